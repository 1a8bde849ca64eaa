// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Waiting for file descriptors: the crate `epoll`, with an owner for what it creates.
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use epoll::{ControlOptions, Event, Events};

/// No event: to fill the space that [`EpollFd::wait`] writes to.
pub const NO_EVENT: Event = Event { events: 0, data: 0 };

/// An epoll instance. It is closed when dropped.
#[derive(Debug)]
pub struct EpollFd(RawFd);

impl EpollFd {
    /// An epoll instance that waits for nothing yet.
    ///
    /// # Errors
    /// If the system has no file descriptors left.
    pub fn new() -> io::Result<Self> {
        epoll::create(true).map(Self)
    }

    /// Waits for `fd` to be readable, too; the event has the number `data`.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn add(&self, fd: &impl AsRawFd, data: u64) -> io::Result<()> {
        self.add_for(fd, Events::EPOLLIN, data)
    }

    /// The same, but for each time that `fd` becomes readable, whether or not it was read since.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn add_edge_triggered(&self, fd: &impl AsRawFd, data: u64) -> io::Result<()> {
        self.add_for(fd, Events::EPOLLIN | Events::EPOLLET, data)
    }

    /// Waits for `events` of `fd`, too.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn add_for(&self, fd: &impl AsRawFd, events: Events, data: u64) -> io::Result<()> {
        let event = Event::new(events, data);
        epoll::ctl(self.0, ControlOptions::EPOLL_CTL_ADD, fd.as_raw_fd(), event)
    }

    /// Waits for `fd` no longer.
    ///
    /// # Errors
    /// If it was not added.
    pub fn remove(&self, fd: &impl AsRawFd) -> io::Result<()> {
        let fd = fd.as_raw_fd();
        epoll::ctl(self.0, ControlOptions::EPOLL_CTL_DEL, fd, NO_EVENT)
    }

    /// Waits for events, for `timeout` milliseconds at most (-1: for ever), and returns those that
    /// have come. A signal ends the wait without an event.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn wait<'e>(&self, timeout: i32, space: &'e mut [Event]) -> io::Result<&'e [Event]> {
        let count = match epoll::wait(self.0, timeout, space) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        Ok(space.get(..count).unwrap_or_default())
    }
}

impl AsRawFd for EpollFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0
    }
}

impl Drop for EpollFd {
    fn drop(&mut self) {
        // It is ours, and nobody else closes it.
        let _ = epoll::close(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::eventfd::{EventFd, EFD_NONBLOCK};

    fn ready(epoll: &EpollFd) -> Vec<u64> {
        let mut space = [NO_EVENT; 4];
        let events = epoll.wait(0, &mut space).unwrap();
        events.iter().map(|event| event.data).collect()
    }

    #[test]
    fn events_come_until_they_are_read_or_once_each() {
        let epoll = EpollFd::new().unwrap();
        let [level, edge] = [0; 2].map(|_| EventFd::new(EFD_NONBLOCK).unwrap());
        epoll.add(&level, 7).unwrap();
        epoll.add_edge_triggered(&edge, 1 << 40).unwrap();
        assert!(ready(&epoll).is_empty());
        level.write(1).unwrap();
        edge.write(1).unwrap();
        let mut both = ready(&epoll);
        both.sort_unstable();
        assert_eq!(both, [7, 1 << 40]);
        assert_eq!(ready(&epoll), [7]);
        level.read().unwrap();
        edge.write(1).unwrap();
        assert_eq!(ready(&epoll), [1 << 40]);
        epoll.remove(&edge).unwrap();
        edge.write(1).unwrap();
        assert!(ready(&epoll).is_empty());
        assert!(epoll.remove(&edge).is_err());
    }

    #[test]
    fn file_descriptors_are_closed() {
        const MANY: i32 = 4096;
        for _ in 0..MANY {
            let epoll = EpollFd::new().unwrap();
            assert!(epoll.0 < MANY);
        }
    }
}
