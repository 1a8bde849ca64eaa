// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sessions over vfio-user, and their threads.
use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use log::{error, Level};
use virtio_rdma_spec::config::CONTROL_QUEUE;
use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};

use super::backend::{notification, Backend};
use super::protocol::{Malformed, HEADER};
use super::registers::kick;
use super::stream::{self, Received, Stream};
use crate::adapter::Adapter;
use crate::epoll_fd::{EpollFd, NO_EVENT};
use crate::error::sentence;
use crate::front_end::{lock, Ended, Protocol, Server, SharedDevice, ShutDown, Vm};
use crate::rnic::RnicSettings;
use crate::sandbox::Sandbox;
use crate::socket::{self, BoundSocket};
use crate::virtio::VirtioDevice;
use crate::worker::{Messages, EXCLUSIVE};

/// Events of the virtqueues' thread: the session ends.
const END: u64 = 0x1_0000;
/// There are more commands.
const MORE: u64 = 0x1_0001;
/// Memory of the VM is lost.
const LOST: u64 = 0x1_0002;
/// Events that are taken at once.
const EVENTS: usize = 16;

/// Event of the thread that reads messages: there are some. [`MORE`] is that a worker has left some.
const SOCKET: u64 = 0;
/// Longest message that notifies a virtqueue: a write of 4 bytes.
const NOTIFICATION: usize = HEADER + 16 + 4;
/// Notifications that a worker takes at a time, at most.
const MOST_NOTIFICATIONS: usize = 32;

/// Serves VMs on `socket` by vfio-user: for each front end that connects, an rnic of `settings` is
/// attached. Its threads are confined by `sandbox`.
///
/// # Errors
/// If the system has no threads or file descriptors left.
pub fn serve(
    socket: BoundSocket,
    adapter: Arc<Adapter>,
    settings: RnicSettings,
    sandbox: &Sandbox,
) -> Result<Server, socket::Error> {
    Server::start(socket, adapter, settings, sandbox, VfioUser)
}

struct VfioUser(UnixListener);

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error(transparent)]
    Stream(#[from] stream::Error),
    #[error("the protocol was violated")]
    Malformed(#[from] Malformed),
    #[error("the system refused")]
    System(#[from] io::Error),
}

impl Protocol for VfioUser {
    const NAME: &'static str = "vfio-user";

    fn listener(&self) -> &impl AsRawFd {
        &self.0
    }

    fn serve(&mut self, vm: &Vm) -> Ended {
        match self.session(vm) {
            Ok(()) => Ended::Disconnected,
            Err(error @ (SessionError::Stream(_) | SessionError::Malformed(_))) => {
                Ended::ByFrontEnd(sentence(&error))
            }
            Err(error) => Ended::BySystem(sentence(&error)),
        }
    }
}

impl VfioUser {
    fn session(&self, vm: &Vm) -> Result<(), SessionError> {
        let mut accepted = None;
        let begun = vm.connection.begin(|| {
            // It does not wait: the front end is there, and nobody else accepts.
            let (stream, _) = self.0.accept()?;
            let other = stream.try_clone()?;
            accepted = Some(stream);
            let shut_down: ShutDown = Box::new(move || {
                // If it fails, the front end has disconnected.
                let _ = other.shutdown(Shutdown::Both);
            });
            Ok::<_, io::Error>(Some(shut_down))
        })?;
        let Some(socket) = accepted.filter(|_| begun) else {
            return Ok(());
        };
        let end = EventFd::new(EFD_NONBLOCK)?;
        let mut session = Session {
            backend: Backend::new(vm)?,
            end,
            virtqueues: None,
        };
        session.start()?;
        vm.log
            .log(Level::Info, format_args!("a front end connected"));
        let incoming = Incoming::new(&socket, &session.backend, &vm.adapter)?;
        // In this order: see `worker::messages`.
        let _notifications = Notifications::from(&socket, incoming.clone(), &vm.adapter)?;
        let epoll = EpollFd::new()?;
        epoll.add_for(&socket, EXCLUSIVE, SOCKET)?;
        epoll.add_edge_triggered(&incoming.more, MORE)?;
        loop {
            epoll.wait(-1, &mut [NO_EVENT; 2])?;
            // A worker that finds it locked leaves everything to this thread.
            let mut stream = lock(&incoming.stream);
            loop {
                let message = match stream.receive()? {
                    Received::Message(message) => message,
                    Received::Nothing => break,
                    Received::End => return Ok(()),
                };
                let header = message.header;
                let backend = &mut session.backend;
                let answer = backend.handle(header.command, &message.body, message.files)?;
                // The version comes first.
                incoming.greeted.store(true, Ordering::Relaxed);
                if !header.no_reply {
                    stream.reply(&header.reply(&answer))?;
                }
            }
        }
    }
}

/// What comes from a front end: its thread reads it, and a worker that sleeps takes notifications.
#[derive(Debug)]
struct Incoming {
    stream: Mutex<Stream>,
    /// Notifications mean something.
    greeted: AtomicBool,
    kicks: Arc<Vec<File>>,
    /// The doorbell queue of the worker that takes notifications.
    doorbell: u64,
    /// There is more than the worker has taken.
    more: EventFd,
}

impl Incoming {
    fn new(socket: &UnixStream, backend: &Backend, adapter: &Adapter) -> io::Result<Arc<Self>> {
        let kicks = backend.kicks().clone();
        let doorbell = kicks.len().saturating_sub(adapter.workers().into());
        Ok(Arc::new(Self {
            stream: Mutex::new(Stream(socket.try_clone()?)),
            greeted: AtomicBool::new(false),
            kicks,
            doorbell: doorbell as u64,
            more: EventFd::new(EFD_NONBLOCK)?,
        }))
    }

    /// Takes notifications. Returns whether there is nothing else.
    fn take(&self, stream: &mut Stream) -> bool {
        let mut space = [0; MOST_NOTIFICATIONS * NOTIFICATION];
        let Some(seen) = stream.peek(&mut space) else {
            return true;
        };
        let mut left = seen;
        while let Some((queue, length)) = notification(left, self.kicks.len()) {
            // The worker is awake, and looks for itself.
            if queue != self.doorbell {
                kick(&self.kicks, queue);
            }
            left = left.get(length..).unwrap_or_default();
        }
        let (seen, taken) = (seen.len(), seen.len() - left.len());
        let Some(notifications) = space.get_mut(..taken).filter(|all| !all.is_empty()) else {
            // The end is something else, too.
            return false;
        };
        stream.skip(notifications) && taken == seen && seen < MOST_NOTIFICATIONS * NOTIFICATION
    }
}

impl Messages for Incoming {
    fn take_notifications(&self) {
        let greeted = self.greeted.load(Ordering::Relaxed);
        let stream = self.stream.try_lock().ok().filter(|_| greeted);
        if !stream.is_some_and(|mut stream| self.take(&mut stream)) {
            // It fails only when the counter is full.
            let _ = self.more.write(1);
        }
    }
}

/// A worker takes notifications from what comes, until this is dropped.
struct Notifications<'a> {
    adapter: &'a Adapter,
    socket: &'a UnixStream,
    number: u64,
}

impl<'a> Notifications<'a> {
    fn from(
        socket: &'a UnixStream,
        incoming: Arc<Incoming>,
        adapter: &'a Adapter,
    ) -> io::Result<Self> {
        let number = adapter.add_messages(socket, incoming)?;
        Ok(Self {
            adapter,
            socket,
            number,
        })
    }
}

impl Drop for Notifications<'_> {
    fn drop(&mut self) {
        self.adapter.remove_messages(self.socket, self.number);
    }
}

/// A front end that is served. Dropped when it is gone: returns when the virtqueues' thread has
/// ended, and the VM is detached.
struct Session {
    backend: Backend,
    end: EventFd,
    virtqueues: Option<JoinHandle<()>>,
}

impl Session {
    /// Starts the virtqueues' thread.
    fn start(&mut self) -> io::Result<()> {
        let (device, kicks) = (self.backend.device().clone(), self.backend.kicks().clone());
        let epoll = EpollFd::new()?;
        epoll.add_edge_triggered(&self.end, END)?;
        epoll.add_edge_triggered(device.more(), MORE)?;
        epoll.add_edge_triggered(device.lost(), LOST)?;
        // Those of doorbell queues wake workers.
        let is_doorbell = |index| device.with(|device| device.is_doorbell(index));
        for (index, kick) in (0..).zip(&*kicks).filter(|(index, _)| !is_doorbell(*index)) {
            epoll.add_edge_triggered(kick, index.into())?;
        }
        let thread = std::thread::Builder::new().name("virtqueues".into());
        let virtqueues = Virtqueues {
            epoll,
            device,
            _kicks: kicks,
        };
        self.virtqueues = Some(thread.spawn(move || virtqueues.run())?);
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // It fails only when the counter is full, which takes more ends than one.
        let _ = self.end.write(1);
        if let Some(Err(_)) = self.virtqueues.take().map(JoinHandle::join) {
            error!("the thread of virtqueues panicked");
        }
        self.backend.device().with(VirtioDevice::detach);
    }
}

/// What the virtqueues' thread works with.
struct Virtqueues {
    epoll: EpollFd,
    device: Arc<SharedDevice>,
    /// They stay open as long as they are waited for.
    _kicks: Arc<Vec<File>>,
}

impl Virtqueues {
    fn run(self) {
        let mut space = [NO_EVENT; EVENTS];
        loop {
            let events = match self.epoll.wait(-1, &mut space) {
                Ok(events) => events,
                Err(error) => {
                    error!("cannot wait for virtqueues: {error}");
                    return;
                }
            };
            for event in events {
                match event.data {
                    END => return,
                    MORE => self.device.notified(CONTROL_QUEUE),
                    LOST => self.device.end_by_loss(),
                    index => {
                        // It is the number of a virtqueue.
                        self.device.notified(index as u16);
                    }
                }
            }
        }
    }
}
