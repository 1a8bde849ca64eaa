// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Eventfds that somebody else shares with this process: they are signalled without ever waiting
//! for that somebody.
//!
//! A write to an eventfd waits as long as its counter is full, unless its file description says
//! that nobody waits. The front end shares that description: it can fill the counter and take the
//! flag back at any time, also between a look at it and the write. But the kernel adds to an
//! eventfd of its own accord, and never waits, when a request of Linux AIO completes that names
//! the eventfd (`IOCB_FLAG_RESFD`, io_submit(2)). So a signal here is a request to read nothing
//! from `/dev/null`.
use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, PoisonError};

use vmm_sys_util::aio::{
    IoContext, IoControlBlock, IoEvent, IOCB_CMD_PREAD, IOCB_CMD_PWRITE, IOCB_FLAG_RESFD,
};

/// Completed requests that are taken from the kernel at once.
const COMPLETED: usize = 32;

/// What eventfds are signalled by.
struct Signaller {
    aio: IoContext,
    /// `/dev/null`, for reading only.
    null: File,
    /// Requests whose completion was not taken from the kernel yet.
    completed: usize,
}

impl Signaller {
    fn new() -> io::Result<Self> {
        Ok(Self {
            // The kernel has room for as many, or more.
            aio: IoContext::new(COMPLETED as u32)?,
            null: File::open("/dev/null")?,
            completed: 0,
        })
    }

    fn request(&self, command: u32, eventfd: &File) -> io::Result<()> {
        let mut request = IoControlBlock {
            aio_fildes: self.null.as_raw_fd() as u32,
            aio_lio_opcode: command as u16,
            aio_flags: IOCB_FLAG_RESFD,
            aio_resfd: eventfd.as_raw_fd() as u32,
            ..IoControlBlock::default()
        };
        self.aio.submit(&[&mut request]).map(|_| ())
    }

    fn signal(&mut self, eventfd: &File) -> io::Result<()> {
        if self.completed == COMPLETED {
            // They have completed when they were submitted: this does not wait.
            self.aio
                .get_events(0, &mut [IoEvent::default(); COMPLETED], None)?;
            self.completed = 0;
        }
        self.request(IOCB_CMD_PREAD, eventfd)?;
        self.completed += 1;
        Ok(())
    }

    /// The kernel looks at the eventfd before it refuses to write to what is open for reading only.
    fn check(&self, fd: &File) -> io::Result<()> {
        match self.request(IOCB_CMD_PWRITE, fd) {
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => Ok(()),
            Err(error) => Err(error),
            Ok(()) => Err(io::ErrorKind::Other.into()),
        }
    }
}

/// That of all threads without one of their own.
static SHARED: Mutex<Option<Signaller>> = Mutex::new(None);

thread_local! {
    /// That of a worker: it does not wait for others.
    static OWN: RefCell<Option<Signaller>> = const { RefCell::new(None) };
}

/// Gives all threads that have nothing of their own what they need to signal eventfds, while the
/// process may still open files.
///
/// # Errors
/// If the system has no Linux AIO, or no more room for it (`/proc/sys/fs/aio-max-nr`).
pub fn set_up() -> io::Result<()> {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if shared.is_none() {
        *shared = Some(Signaller::new()?);
    }
    Ok(())
}

/// Gives this thread what it needs to signal eventfds without waiting for other threads.
///
/// # Errors
/// If the system has no Linux AIO, or no more room for it (`/proc/sys/fs/aio-max-nr`).
pub fn set_up_thread() -> io::Result<()> {
    let own = Signaller::new()?;
    OWN.set(Some(own));
    Ok(())
}

/// Calls `f` with what this thread signals eventfds by.
fn with<R>(f: impl FnOnce(&mut Signaller) -> io::Result<R>) -> io::Result<R> {
    OWN.with_borrow_mut(|own| {
        if let Some(own) = own {
            return f(own);
        }
        set_up()?;
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared
            .as_mut()
            .map_or_else(|| Err(io::ErrorKind::Other.into()), f)
    })
}

/// Adds one to the counter of an eventfd, unless it is full. It never waits for those who share it.
///
/// # Errors
/// If `fd` is not an eventfd, or the system has no Linux AIO, or no more room for it.
pub fn signal(fd: &File) -> io::Result<()> {
    with(|signaller| signaller.signal(fd))
}

/// Finds out whether `fd` is an eventfd. Its counter stays as it is.
///
/// # Errors
/// As [`signal`].
pub fn check(fd: &File) -> io::Result<()> {
    with(|signaller| signaller.check(fd))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::{FromRawFd, IntoRawFd};
    use vmm_sys_util::eventfd::EventFd;

    /// An eventfd that blocks, as a file.
    #[allow(unsafe_code)]
    fn eventfd() -> File {
        let fd = EventFd::new(0).unwrap().into_raw_fd();
        // SAFETY: it was just made, and nobody else has it.
        unsafe { File::from_raw_fd(fd) }
    }

    fn count(mut eventfd: &File) -> u64 {
        let mut count = [0; 8];
        eventfd.read_exact(&mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    #[test]
    fn each_signal_adds_one_from_any_thread() {
        let eventfd = eventfd();
        let more = 3 * COMPLETED as u64 + 1;
        (0..more).for_each(|_| signal(&eventfd).unwrap());
        assert_eq!(count(&eventfd), more);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                set_up_thread().unwrap();
                (0..more).for_each(|_| signal(&eventfd).unwrap());
            });
        });
        assert_eq!(count(&eventfd), more);
    }

    #[test]
    fn a_full_counter_holds_nobody_up() {
        let eventfd = eventfd();
        (&eventfd).write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        signal(&eventfd).unwrap();
        signal(&eventfd).unwrap();
        assert_eq!(count(&eventfd), u64::MAX);
    }

    #[test]
    fn only_eventfds_are_eventfds() {
        let eventfd = eventfd();
        check(&eventfd).unwrap();
        signal(&eventfd).unwrap();
        check(&eventfd).unwrap();
        assert_eq!(count(&eventfd), 1);
        let (reader, writer) = std::io::pipe().unwrap();
        for fd in [
            File::from(std::os::fd::OwnedFd::from(reader)),
            File::from(std::os::fd::OwnedFd::from(writer)),
            File::open("/dev/null").unwrap(),
        ] {
            assert!(check(&fd).is_err());
            assert!(signal(&fd).is_err());
        }
    }
}
