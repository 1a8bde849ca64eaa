// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! The virtio device and its virtqueues.
use super::alloc::{Array, Box};
use super::bindings;
use super::dma::DmaDevice;
use super::error::{Errno, Result};
use super::sync::{which, Completion, Mutex, Semaphore, SpinLock};
use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use virtio_rdma_spec::config::Config;
use virtio_rdma_spec::layout::Layout;

/// A handle of the virtio device; valid as long as the driver is bound to it.
#[derive(Clone, Copy)]
pub(crate) struct VirtioDevice(pub(crate) NonNull<bindings::virtio_device>);

// SAFETY: a handle; what is done with it is safe from any thread.
unsafe impl Send for VirtioDevice {}
// SAFETY: as above.
unsafe impl Sync for VirtioDevice {}

/// Where queues are notified, as the PCI capability says.
pub(crate) struct NotifyCapability {
    /// Physical address of the notification structure.
    pub(crate) start: u64,
    /// Its length, bytes.
    pub(crate) length: u64,
    /// Bytes between the addresses of two notification offsets.
    pub(crate) multiplier: u32,
}

impl VirtioDevice {
    pub(crate) fn has_feature(self, bit: u32) -> bool {
        // SAFETY: a bound device.
        unsafe { bindings::vrdma_has_feature(self.0.as_ptr(), bit) }
    }

    /// Was the device pulled out?
    pub(crate) fn is_gone(self) -> bool {
        // SAFETY: a bound device.
        unsafe { bindings::vrdma_is_gone(self.0.as_ptr()) }
    }

    /// Does the device say that it failed?
    pub(crate) fn needs_reset(self) -> bool {
        // SAFETY: a bound device.
        unsafe { bindings::vrdma_needs_reset(self.0.as_ptr()) }
    }

    /// Reads the configuration space, all of one generation. May sleep.
    pub(crate) fn config(self) -> Config {
        let mut words = [0u32; Config::SIZE / 4];
        // SAFETY: the array has room for these words.
        unsafe {
            bindings::vrdma_config_read(self.0.as_ptr(), 0, words.as_mut_ptr(), words.len() as u32)
        };
        let mut bytes = [0; Config::SIZE];
        for (bytes, word) in bytes.chunks_exact_mut(4).zip(words) {
            // As the device has them: the words are little-endian in memory already.
            word.to_ne_bytes().put(bytes);
        }
        Config::from_bytes(&bytes)
    }

    /// Only the word of the configuration space that says whether the link is up. May sleep.
    pub(crate) fn link_up(self) -> bool {
        const WORD: usize = 8;
        const LINK_UP: usize = 10;
        let mut word = 0u32;
        // SAFETY: one word.
        unsafe { bindings::vrdma_config_read(self.0.as_ptr(), WORD as u32, &mut word, 1) };
        word.to_ne_bytes()
            .get(LINK_UP - WORD)
            .is_some_and(|link_up| *link_up != 0)
    }

    /// From here on the device works: it may interrupt, and answers commands.
    pub(crate) fn ready(self) {
        // SAFETY: the queues are set up, and the driver's data is in place.
        unsafe { bindings::vrdma_device_ready(self.0.as_ptr()) }
    }

    /// Stops the device: afterwards it touches no memory of ours, and no callback runs. May sleep.
    pub(crate) fn reset(self) {
        // SAFETY: a bound device; callers are in process context.
        unsafe { bindings::vrdma_reset(self.0.as_ptr()) }
    }

    /// The device that DMA addresses are for; from here on with pieces of memory of any length.
    pub(crate) fn dma(self) -> Result<DmaDevice> {
        // SAFETY: a bound device.
        let parent = unsafe { (*self.0.as_ptr()).dev.parent };
        let parent = NonNull::new(parent).ok_or(Errno::ENODEV)?;
        // SAFETY: alive, as above, and bound to the driver that brought the virtio device.
        unsafe { bindings::vrdma_dma_unlimited(parent.as_ptr()) };
        Ok(DmaDevice(parent))
    }

    /// Vendor, device and revision of the PCI device.
    pub(crate) fn pci_ids(self) -> (u32, u32, u32) {
        let (mut vendor, mut device, mut revision) = (0, 0, 0);
        // SAFETY: three places to write to.
        unsafe {
            bindings::vrdma_pci_ids(self.0.as_ptr(), &mut vendor, &mut device, &mut revision)
        };
        (vendor, device, revision)
    }

    pub(crate) fn notify_capability(self) -> Result<NotifyCapability> {
        let mut found = bindings::vrdma_notify_capability {
            start: 0,
            length: 0,
            multiplier: 0,
        };
        // SAFETY: a place to write to.
        Errno::check(unsafe { bindings::vrdma_notify_capability(self.0.as_ptr(), &mut found) })?;
        Ok(NotifyCapability {
            start: found.start,
            length: found.length,
            multiplier: found.multiplier,
        })
    }

    /// The notification offset of every queue. During probe only.
    pub(crate) fn notify_offsets(self, queues: usize) -> Result<Array<u16>> {
        let mut offsets = Array::new(queues, |_| Ok(0))?;
        // SAFETY: there is room for that many.
        Errno::check(unsafe {
            bindings::vrdma_notify_offsets(self.0.as_ptr(), queues as u32, offsets.as_mut_ptr())
        })?;
        Ok(offsets)
    }

    /// Logs an error, and a number that says more.
    pub(crate) fn error(self, text: &str, number: i64) {
        // SAFETY: a bound device; the text has this length.
        unsafe {
            let dev = &raw mut (*self.0.as_ptr()).dev;
            bindings::vrdma_log_error(dev, text.as_ptr().cast(), text.len(), number);
        }
    }

    /// Logs what failed, and the error's name.
    pub(crate) fn failed(self, text: &str, error: Errno) {
        // SAFETY: a bound device; the text has this length.
        unsafe {
            let dev = &raw mut (*self.0.as_ptr()).dev;
            bindings::vrdma_log_errno(dev, text.as_ptr().cast(), text.len(), error.code());
        }
    }

    /// Logs something that its operator should know.
    pub(crate) fn warning(self, text: &str) {
        // SAFETY: a bound device; the text has this length.
        unsafe {
            let dev = &raw mut (*self.0.as_ptr()).dev;
            bindings::vrdma_log_warning(dev, text.as_ptr().cast(), text.len());
        }
    }

    /// Logs something of interest, and a number that says more.
    pub(crate) fn info(self, text: &str, number: i64) {
        // SAFETY: a bound device; the text has this length.
        unsafe {
            let dev = &raw mut (*self.0.as_ptr()).dev;
            bindings::vrdma_log_info(dev, text.as_ptr().cast(), text.len(), number);
        }
    }
}

/// Has the driver be unbound from the device, and bound again.
pub(crate) struct Rebind(NonNull<bindings::vrdma_rebind>);

// SAFETY: a handle; `schedule` is called once, by the first that comes, and it is dropped by its
// owner.
unsafe impl Send for Rebind {}
// SAFETY: as above.
unsafe impl Sync for Rebind {}

impl Rebind {
    pub(crate) fn new(device: VirtioDevice) -> Result<Self> {
        // SAFETY: a bound device, of which it takes a reference.
        let rebind = unsafe { bindings::vrdma_rebind_new(device.0.as_ptr()) };
        NonNull::new(rebind).map(Self).ok_or(Errno::ENOMEM)
    }

    /// Does it after this time, unless somebody else unbinds the driver first. At most once; any
    /// context.
    pub(crate) fn schedule(&self, milliseconds: u32) {
        // SAFETY: initialized; the work holds a reference of its own.
        unsafe { bindings::vrdma_rebind_schedule(self.0.as_ptr(), milliseconds) }
    }
}

impl Drop for Rebind {
    fn drop(&mut self) {
        // SAFETY: our reference, given back once.
        unsafe { bindings::vrdma_rebind_free(self.0.as_ptr()) }
    }
}

/// The virtqueues; dropping it gives them back. Everything made from them must be dropped before,
/// and the device reset.
pub(crate) struct Virtqueues {
    device: VirtioDevice,
    queues: Array<*mut bindings::virtqueue>,
}

// SAFETY: a list of handles; what is done with them locks (CommandQueue) or is told to be
// serialized (EventQueue).
unsafe impl Send for Virtqueues {}
// SAFETY: as above.
unsafe impl Sync for Virtqueues {}

impl Virtqueues {
    /// Sets up queues 0 to `total` - 1; those below `first_doorbell` interrupt.
    pub(crate) fn find(device: VirtioDevice, total: u16, first_doorbell: u16) -> Result<Self> {
        let mut queues = Array::new(usize::from(total), |_| Ok(core::ptr::null_mut()))?;
        // SAFETY: there is room for that many.
        Errno::check(unsafe {
            bindings::vrdma_find_vqs(
                device.0.as_ptr(),
                u32::from(total),
                u32::from(first_doorbell),
                queues.as_mut_ptr(),
            )
        })?;
        Ok(Self { device, queues })
    }

    fn get(&self, index: u16) -> Result<NonNull<bindings::virtqueue>> {
        let queue = self.queues.get(usize::from(index)).copied();
        queue.and_then(NonNull::new).ok_or(Errno::EINVAL)
    }

    /// What notifies the device of work in a doorbell queue. Valid as long as the queues are.
    pub(crate) fn notifier(&self, index: u16) -> Result<Notifier> {
        self.get(index).map(Notifier)
    }

    /// Lets a queue interrupt the n-th CPU.
    pub(crate) fn spread(&self, index: u16, n: u16) {
        if let Ok(queue) = self.get(index) {
            // SAFETY: a queue of this device.
            unsafe { bindings::vrdma_vq_spread(queue.as_ptr(), u32::from(n)) }
        }
    }
}

impl Drop for Virtqueues {
    fn drop(&mut self) {
        // SAFETY: found by vrdma_find_vqs, used no longer.
        unsafe { bindings::vrdma_del_vqs(self.device.0.as_ptr()) }
    }
}

/// Wakes the worker of a doorbell queue.
#[derive(Clone, Copy)]
pub(crate) struct Notifier(NonNull<bindings::virtqueue>);

// SAFETY: a handle; notifying needs no lock.
unsafe impl Send for Notifier {}
// SAFETY: as above.
unsafe impl Sync for Notifier {}

impl Notifier {
    /// Any context.
    pub(crate) fn notify(self) {
        // SAFETY: the queues outlive all that can notify (the order of fields in Device).
        unsafe { bindings::virtqueue_notify(self.0.as_ptr()) };
    }
}

/// How long a command may take until the device counts as failed. Deregistering waits for accesses
/// to end, so this is generous.
const COMMAND_TIMEOUT_MS: u32 = 60_000;
/// How often the wait looks whether the device is still there.
const COMMAND_POLL_MS: u32 = 500;
/// Most bytes of a command and its response together: less than a page, so that they are
/// physically contiguous.
const COMMAND_BYTES: usize = 1024;

/// A command on its way: shared with the device until `done`.
struct Request {
    done: Completion,
    /// Bytes of the response that the device wrote, or [`Request::ABORTED`].
    used: AtomicU32,
    /// The command, then room for the response.
    bytes: Array<u8>,
}

impl Request {
    const ABORTED: u32 = u32::MAX;
}

/// The response to a command.
pub(crate) struct Answer {
    request: Box<Request>,
    start: usize,
    length: usize,
}

impl Answer {
    /// What the device wrote of it.
    pub(crate) fn bytes(&self) -> &[u8] {
        let response = self.request.bytes.get(self.start..);
        response
            .and_then(|response| response.get(..self.length))
            .unwrap_or(&[])
    }
}

/// The control queue: any number of commands at a time, each waits for its own response.
pub(crate) struct CommandQueue {
    device: VirtioDevice,
    queue: NonNull<bindings::virtqueue>,
    /// Guards `queue`; taken in interrupts too.
    lock: SpinLock,
    /// Commands that fit into the queue.
    room: Semaphore,
    /// Set for good when the device failed or goes: it was reset, and no command is accepted.
    dead: AtomicBool,
    /// The thread that makes it dead holds this until no request is left.
    dying: Mutex,
    /// While the device is taken into use: who answers commands may come later than the device.
    starting: AtomicBool,
}

// SAFETY: `queue` is used under `lock` only.
unsafe impl Send for CommandQueue {}
// SAFETY: as above.
unsafe impl Sync for CommandQueue {}

impl CommandQueue {
    pub(crate) fn new(queues: &Virtqueues, index: u16) -> Result<Self> {
        let queue = queues.get(index)?;
        // SAFETY: a queue of this device.
        let size = unsafe { bindings::virtqueue_get_vring_size(queue.as_ptr()) };
        // A command takes two descriptors.
        let room = i32::try_from(size / 2).unwrap_or(1).max(1);
        Ok(Self {
            device: queues.device,
            queue,
            lock: SpinLock::new(which::COMMANDS)?,
            room: Semaphore::new(room)?,
            dead: AtomicBool::new(false),
            dying: Mutex::new(which::DYING)?,
            starting: AtomicBool::new(true),
        })
    }

    /// From here on a command that takes too long means that the device is lost.
    pub(crate) fn expect_answers(&self) {
        self.starting.store(false, Ordering::Relaxed);
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Sends a command of `command` bytes, which `write` puts into zeroed memory, and waits for its
    /// response of at most `response` bytes. Fails with EIO when the device does not answer any
    /// more, and then it is dead.
    pub(crate) fn execute(
        &self,
        command: usize,
        response: usize,
        write: impl FnOnce(&mut [u8]),
    ) -> Result<Answer> {
        let total = command.saturating_add(response);
        if command == 0 || response == 0 || total > COMMAND_BYTES {
            return Err(Errno::EINVAL);
        }
        let mut request = Box::new(Request {
            done: Completion::new()?,
            used: AtomicU32::new(Request::ABORTED),
            bytes: Array::new(total, |_| Ok(0))?,
        })?;
        write(request.bytes.get_mut(..command).ok_or(Errno::EINVAL)?);
        let start = request.bytes.as_mut_ptr();
        // SAFETY: inside of the buffer, whose length is the sum.
        let buffers = unsafe { [(start, command), (start.add(command), response)] };
        self.room.with(|| self.transfer(&request, buffers))?;

        let length = match request.used.load(Ordering::Acquire) {
            Request::ABORTED => return Err(Errno::EIO),
            used => (used as usize).min(response),
        };
        Ok(Answer {
            request,
            start: command,
            length,
        })
    }

    /// Gives a request to the device, with its buffers for command and response, and returns when
    /// it has them back, answered or not.
    fn transfer(&self, request: &Box<Request>, buffers: [(*mut u8, usize); 2]) -> Result<()> {
        let request_ptr = request.as_ptr();
        let [(command, command_length), (response, response_length)] = buffers;
        let (added, notify) = self.lock.with(|| {
            if self.is_dead() {
                return (Err(Errno::EIO), false);
            }
            // SAFETY: the queue is ours under the lock. The buffers are in kmalloc'ed memory that
            // stays until `done` (below); a token in the queue is always such a request.
            unsafe {
                let added = Errno::check(bindings::vrdma_vq_add(
                    self.queue.as_ptr(),
                    command.cast(),
                    command_length as u32,
                    response.cast(),
                    response_length as u32,
                    request_ptr.cast(),
                ));
                let notify = added.is_ok() && bindings::virtqueue_kick_prepare(self.queue.as_ptr());
                (added, notify)
            }
        });
        added?;
        if notify {
            // SAFETY: notifying needs no lock.
            unsafe { bindings::virtqueue_notify(self.queue.as_ptr()) };
        }
        let mut waited = 0u32;
        while !request.done.wait(COMMAND_POLL_MS) {
            waited = waited.saturating_add(COMMAND_POLL_MS);
            // SAFETY: only looks.
            let broken = unsafe { bindings::virtqueue_is_broken(self.queue.as_ptr()) };
            let lost = broken || self.device.is_gone() || self.device.needs_reset();
            let late = waited >= COMMAND_TIMEOUT_MS && !self.starting.load(Ordering::Relaxed);
            if lost || late {
                if !self.is_dead() {
                    self.device.warning(if lost {
                        "the device was lost with a command under way"
                    } else {
                        "the device did not answer a command for a minute"
                    });
                }
                self.die();
                // The thread that made it dead completes all requests.
                request.done.wait_forever();
                break;
            }
        }
        Ok(())
    }

    /// The queue's interrupt: responses have come.
    pub(crate) fn interrupt(&self) {
        self.lock.with(|| loop {
            // SAFETY: the queue is ours under the lock.
            unsafe { bindings::virtqueue_disable_cb(self.queue.as_ptr()) };
            loop {
                let mut used = 0;
                // SAFETY: as above.
                let token = unsafe { bindings::virtqueue_get_buf(self.queue.as_ptr(), &mut used) };
                let Some(request) = NonNull::new(token.cast::<Request>()) else {
                    break;
                };
                Self::finish(request, used.min(COMMAND_BYTES as u32));
            }
            // SAFETY: as above.
            if unsafe { bindings::virtqueue_enable_cb(self.queue.as_ptr()) } {
                break;
            }
        });
    }

    /// Resets the device and aborts what is under way. Afterwards the device has no access to
    /// memory; all commands fail. May sleep.
    pub(crate) fn die(&self) {
        self.dying.with(|| {
            if self.dead.swap(true, Ordering::AcqRel) {
                return;
            }
            self.device.reset();
            self.lock.with(|| loop {
                // SAFETY: the queue is ours under the lock, and the device is reset.
                let token = unsafe { bindings::virtqueue_detach_unused_buf(self.queue.as_ptr()) };
                let Some(request) = NonNull::new(token.cast::<Request>()) else {
                    break;
                };
                Self::finish(request, Request::ABORTED);
            });
        });
    }

    fn finish(request: NonNull<Request>, used: u32) {
        // SAFETY: a token that the queue gave back is a request whose owner waits for `done` and so
        // keeps it alive.
        let request = unsafe { request.as_ref() };
        request.used.store(used, Ordering::Release);
        request.done.complete();
    }
}

/// A queue of buffers of `N` bytes that the device fills with events. Its methods must not run at
/// the same time.
pub(crate) struct EventQueue<const N: usize> {
    queue: NonNull<bindings::virtqueue>,
    buffers: NonNull<c_void>,
    count: usize,
}

// SAFETY: users serialize (see Device).
unsafe impl<const N: usize> Send for EventQueue<N> {}
// SAFETY: as above.
unsafe impl<const N: usize> Sync for EventQueue<N> {}

/// Most buffers that an event queue gets.
const MAX_EVENT_BUFFERS: usize = 256;

impl<const N: usize> EventQueue<N> {
    pub(crate) fn new(queues: &Virtqueues, index: u16) -> Result<Self> {
        const { assert!(N > 0 && N % 8 == 0 && N <= 64) };
        let queue = queues.get(index)?;
        // SAFETY: a queue of this device.
        let size = unsafe { bindings::virtqueue_get_vring_size(queue.as_ptr()) };
        let count = (size as usize).clamp(1, MAX_EVENT_BUFFERS);
        // SAFETY: no preconditions; null if there is no memory.
        let buffers = unsafe { bindings::vrdma_kzalloc(count.wrapping_mul(N), true) };
        Ok(Self {
            queue,
            buffers: NonNull::new(buffers).ok_or(Errno::ENOMEM)?,
            count,
        })
    }

    /// Gives the device all buffers. Once, before the device is ready.
    pub(crate) fn fill(&self) -> Result<()> {
        for i in 0..self.count {
            // SAFETY: inside of the allocation.
            let buffer = unsafe { self.buffers.cast::<[u8; N]>().add(i) };
            self.add(buffer)?;
        }
        Ok(())
    }

    /// Tells the device that there are buffers.
    pub(crate) fn kick(&self) {
        // SAFETY: a queue of this device; users serialize.
        unsafe { bindings::virtqueue_kick(self.queue.as_ptr()) };
    }

    fn add(&self, buffer: NonNull<[u8; N]>) -> Result<()> {
        // SAFETY: the buffer is one of ours, which the device does not have; it lives until drop.
        Errno::check(unsafe {
            bindings::vrdma_vq_add(
                self.queue.as_ptr(),
                core::ptr::null_mut(),
                0,
                buffer.as_ptr().cast(),
                N as u32,
                buffer.as_ptr().cast(),
            )
        })
    }

    /// Takes all events there are and gives their buffers back; meanwhile the queue need not
    /// interrupt. Any context.
    pub(crate) fn drain(&self, mut event: impl FnMut(&[u8; N])) {
        loop {
            // SAFETY: a queue of this device; users serialize.
            unsafe { bindings::virtqueue_disable_cb(self.queue.as_ptr()) };
            let mut any = false;
            loop {
                let mut used = 0;
                // SAFETY: a queue of this device; users serialize.
                let token = unsafe { bindings::virtqueue_get_buf(self.queue.as_ptr(), &mut used) };
                let Some(buffer) = NonNull::new(token.cast::<[u8; N]>()) else {
                    break;
                };
                // SAFETY: a token of this queue is one of our buffers; read once, the device may do
                // what it wants.
                let bytes = unsafe { buffer.as_ptr().read_volatile() };
                if used as usize >= N {
                    event(&bytes);
                }
                any |= self.add(buffer).is_ok();
            }
            if any {
                self.kick();
            }
            // SAFETY: as above. On a broken queue it returns true.
            if unsafe { bindings::virtqueue_enable_cb(self.queue.as_ptr()) } {
                break;
            }
        }
    }
}

impl<const N: usize> Drop for EventQueue<N> {
    fn drop(&mut self) {
        // SAFETY: the device was reset, or never became ready; nothing else has the buffers.
        unsafe { bindings::kfree(self.buffers.as_ptr()) }
    }
}
