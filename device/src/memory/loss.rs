// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory that is lost while it is in use: the front end truncated the file behind it, the
//! system has no memory left for it, or the hardware reports that it is damaged.
//!
//! The next thread that accesses such memory gets a SIGBUS, which by default ends the process, and
//! with it the devices of all VMs. Here, the handler puts fresh memory in place of the region, so that the
//! access goes on, and tells the VM's session, which ends. What is read from the region until then
//! is zeros, and what is written is forgotten: that VM's loss, and no other's.
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use libc::{c_int, c_void, siginfo_t};
use vmm_sys_util::errno;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::signal::register_signal_handler;

/// Code of a SIGBUS that tells of damaged memory which nobody has accessed yet (sigaction(2)).
const BUS_MCEERR_AO: c_int = 5;

/// A mapping that may be lost.
#[derive(Debug, Clone)]
struct Watched {
    /// That of the [`Watch`].
    number: u64,
    /// Address in this process.
    start: usize,
    /// Bytes.
    len: usize,
    /// Signaled when it is lost.
    lost: Arc<EventFd>,
}

/// All of them. The handler reads them at any time, and takes no lock: a changed copy takes their
/// place, and they are freed when no handler is running that may see them.
static WATCHED: AtomicPtr<Vec<Watched>> = AtomicPtr::new(std::ptr::null_mut());
/// Handlers that are running.
static HANDLERS: AtomicUsize = AtomicUsize::new(0);
/// Held while [`WATCHED`] is changed.
static CHANGING: Mutex<()> = Mutex::new(());

/// Mappings that are watched until this is dropped, which must be before they are unmapped.
#[derive(Debug)]
pub(super) struct Watch {
    number: u64,
}

impl Watch {
    /// Watches mappings, each its address and size in bytes. Each must be a whole mapping, of which
    /// nothing but its content counts. When one is lost, `lost` is signaled.
    pub(super) fn new(
        mappings: impl Iterator<Item = (usize, usize)>,
        lost: &Arc<EventFd>,
    ) -> Result<Self, errno::Error> {
        static HANDLER: OnceLock<Result<(), errno::Error>> = OnceLock::new();
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        (*HANDLER.get_or_init(|| register_signal_handler(libc::SIGBUS, handle)))?;
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        change(|watched| {
            watched.extend(mappings.map(|(start, len)| Watched {
                number,
                start,
                len,
                lost: lost.clone(),
            }));
        });
        Ok(Self { number })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        change(|watched| watched.retain(|one| one.number != self.number));
    }
}

fn change(f: impl FnOnce(&mut Vec<Watched>)) {
    let _changing = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
    let old = WATCHED.load(Ordering::SeqCst);
    // SAFETY: null, or made below; it is freed by who changes it, and that is only us.
    let mut new = unsafe { old.as_ref() }.cloned().unwrap_or_default();
    f(&mut new);
    WATCHED.store(Box::into_raw(Box::new(new)), Ordering::SeqCst);
    // A handler that begins from now on sees the new ones (the order is sequential).
    while HANDLERS.load(Ordering::SeqCst) != 0 {
        std::thread::yield_now();
    }
    if !old.is_null() {
        // SAFETY: made by `Box::into_raw` above, and nobody sees it any longer.
        drop(unsafe { Box::from_raw(old) });
    }
}

/// The handler of SIGBUS. It does only what is safe in one (signal-safety(7)).
extern "C" fn handle(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    let errno = errno::Error::last();
    // SAFETY: the system passes a valid one to a handler with SA_SIGINFO, with an address if the
    // signal is a SIGBUS.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code == BUS_MCEERR_AO {
        // Not accessed yet, and perhaps never.
        return;
    }
    HANDLERS.fetch_add(1, Ordering::SeqCst);
    // By kill(2) it has no address.
    let handled = code > 0 && replace(addr);
    HANDLERS.fetch_sub(1, Ordering::SeqCst);
    if !handled {
        // Not guest memory: it ends as it would without this.
        // SAFETY: the handler of a signal may be changed, and a signal raised, at any time.
        unsafe {
            libc::signal(libc::SIGBUS, libc::SIG_DFL);
            libc::raise(libc::SIGBUS);
        }
    }
    // SAFETY: the thread's own.
    unsafe { *libc::__errno_location() = errno.errno() };
}

/// Puts fresh memory in place of the mapping that has `addr`. Returns false if none is watched
/// there, or the system refuses.
fn replace(addr: usize) -> bool {
    // SAFETY: null, or made by `change`, which frees it only when no handler is running.
    let Some(watched) = (unsafe { WATCHED.load(Ordering::SeqCst).as_ref() }) else {
        return false;
    };
    let found = watched
        .iter()
        .find(|one| addr.wrapping_sub(one.start) < one.len);
    let Some(one) = found else {
        return false;
    };
    // SAFETY: a whole mapping, which its owner keeps: it is watched no longer than it is mapped.
    // Nothing but its content changes, and that is guest memory, which may change at any time.
    let fresh = unsafe {
        libc::mmap(
            one.start as *mut c_void,
            one.len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if fresh == libc::MAP_FAILED {
        return false;
    }
    // If the counter is full, it has been signaled.
    let _ = one.lost.write(1);
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::guest::map;
    use crate::memory::{copy, fetch_bytes, region, ContiguousRange, GuestMemory};
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    /// Memory of two regions, of which the second is lost.
    fn lose() -> (GuestMemory, Arc<EventFd>) {
        let lost = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let regions = [region(0, 2), region(0x10000, 2)];
        let files = regions
            .each_ref()
            .map(|region| region.file.try_clone().unwrap());
        let memory = GuestMemory::of(Arc::new(map(regions.into()).unwrap()), &lost).unwrap();
        for addr in [0, 0x10000] {
            copy(memory.range_at(addr, 8).unwrap(), (&[0xa5; 8][..]).into());
        }
        files[1].set_len(0).unwrap();
        (memory, lost)
    }

    fn bytes(range: ContiguousRange<'_>) -> Vec<u8> {
        let mut bytes = vec![0; range.len()];
        fetch_bytes(&mut bytes, range);
        bytes
    }

    #[test]
    fn lost_memory_is_zeros_and_is_told_of() {
        let (memory, lost) = lose();
        assert!(lost.read().is_err());
        assert_eq!(bytes(memory.range_at(0x10000, 8).unwrap()), [0; 8]);
        assert_eq!(lost.read().unwrap(), 1);
        // All of the region is, once.
        assert_eq!(bytes(memory.range_at(0x11ff8, 8).unwrap()), [0; 8]);
        assert!(lost.read().is_err());
        assert_eq!(bytes(memory.range_at(0, 8).unwrap()), [0xa5; 8]);
    }

    #[test]
    fn several_threads_may_find_it_lost_at_a_time() {
        for _ in 0..50 {
            let (memory, lost) = lose();
            std::thread::scope(|scope| {
                for addr in [0x10000, 0x10800, 0x11000] {
                    let memory = &memory;
                    scope.spawn(move || {
                        assert_eq!(bytes(memory.range_at(addr, 8).unwrap()), [0; 8]);
                    });
                }
                // Others come and go meanwhile.
                scope.spawn(|| drop(lose()));
            });
            assert!((1..=3).contains(&lost.read().unwrap()));
        }
    }
}
