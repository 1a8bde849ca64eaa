// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Notifications that come as messages over a socket, among others, and not by an eventfd.
//!
//! Another thread reads the messages. If it had to wake a worker that sleeps, two threads would wake up
//! one after the other for each notification. So the worker waits for the socket, too. Of those who
//! wait for it and sleep, the kernel wakes one alone, the one that was added first (`EPOLLEXCLUSIVE`):
//! the worker, unless it is awake. It takes notifications, and leaves the rest to the other thread.
use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use epoll::Events;
use vhost_device_rdma_sync::lock;

use super::handle::{Worker, MESSAGES};

/// What there is to wait for, for each of those who wait for a socket.
pub(crate) const EXCLUSIVE: Events = Events::EPOLLIN.union(Events::EPOLLEXCLUSIVE);

/// Messages of a front end.
pub(crate) trait Messages: fmt::Debug + Send + Sync {
    /// Takes notifications that have come, if nobody else is at it, and tells who reads the messages if
    /// there may be more. A worker calls it: it must not wait for anybody.
    fn take_notifications(&self);
}

/// A worker that has been woken and stays awake reads messages after so long, nanoseconds.
const MOST_UNREAD: u64 = 20_000;

/// A sleep of less than this is a short one, nanoseconds: the next notification is probably about to
/// come.
const SHORT: u64 = 50_000;

/// Messages are left for so many short sleeps, and for so long, nanoseconds, at most.
const MOST_LEFT: u32 = 16;
const LONGEST_LEFT: u64 = 1_000_000;

/// Messages that have woken a worker, and that it has not read.
///
/// The worker finds the work that they are about without them. To read one takes as long as to
/// carry out a short message. So a worker that has time for it reads them while it looks for more
/// work; one that is woken for each message, and whose CPU others need, leaves some and reads them
/// together. All times are nanoseconds.
#[derive(Debug, Default)]
pub(super) struct Unread {
    numbers: Vec<u64>,
    /// The sleeps that they have ended, the time of the first of these, and of the last.
    sleeps: u32,
    first: u64,
    last: u64,
    /// The last sleep was short.
    short: bool,
}

impl Unread {
    /// Messages `number` have woken the worker.
    pub(super) fn add(&mut self, number: u64) {
        if !self.numbers.contains(&number) {
            self.numbers.push(number);
        }
    }

    /// The worker has slept since `since`. To be called after [`Self::add`] for all that woke it.
    pub(super) fn slept(&mut self, since: u64, now: u64) {
        if self.numbers.is_empty() {
            return;
        }
        if self.sleeps == 0 {
            self.first = now;
        }
        self.sleeps += 1;
        self.last = now;
        self.short = now.saturating_sub(since) < SHORT;
    }

    /// Whether to read them now, though there is work.
    pub(super) fn is_urgent(&self, now: u64) -> bool {
        !self.numbers.is_empty() && now.saturating_sub(self.last) > MOST_UNREAD
    }

    /// Whether to read them before the worker sleeps again.
    pub(super) fn is_due(&self, now: u64) -> bool {
        self.latest()
            .is_some_and(|latest| !self.short || self.sleeps >= MOST_LEFT || now >= latest)
    }

    /// When to wake up to read them.
    pub(super) fn latest(&self) -> Option<u64> {
        let latest = self.first.saturating_add(LONGEST_LEFT);
        (!self.numbers.is_empty()).then_some(latest)
    }

    /// The numbers of those to read now: all of them.
    pub(super) fn take(&mut self) -> impl Iterator<Item = u64> + '_ {
        self.sleeps = 0;
        self.numbers.drain(..)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }
}

/// Whose messages a worker is woken by, by their number.
#[derive(Debug, Default)]
pub(super) struct List {
    last: u64,
    all: Vec<(u64, Arc<dyn Messages>)>,
}

impl Worker {
    /// Wakes the worker, if it sleeps, for messages at `socket`. To be called before anybody else waits
    /// for the socket. Returns their number, for [`Self::remove_messages`].
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn add_messages(
        &self,
        socket: &impl AsRawFd,
        messages: Arc<dyn Messages>,
    ) -> io::Result<u64> {
        let number = {
            let mut list = lock(&self.messages);
            list.last += 1;
            let number = MESSAGES + list.last;
            list.all.push((number, messages));
            number
        };
        let events = EXCLUSIVE | Events::EPOLLET;
        if let Err(error) = self.epoll.add_for(socket, events, number) {
            self.forget_messages(number);
            return Err(error);
        }
        Ok(number)
    }

    /// Waits for messages `number`, at `socket`, no longer.
    pub(crate) fn remove_messages(&self, socket: &impl AsRawFd, number: u64) {
        if let Err(error) = self.epoll.remove(socket) {
            log::error!(
                "worker {}: cannot stop waiting for messages: {error}",
                self.index
            );
        }
        self.forget_messages(number);
    }

    fn forget_messages(&self, number: u64) {
        lock(&self.messages)
            .all
            .retain(|(other, _)| *other != number);
    }

    /// Takes notifications from messages `number`, unless they have gone.
    pub(super) fn take_notifications(&self, number: u64) {
        let messages = {
            let list = lock(&self.messages);
            let found = list.all.iter().find(|(other, _)| *other == number);
            found.map(|(_, messages)| messages.clone())
        };
        if let Some(messages) = messages {
            messages.take_notifications();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::epoll_fd::{EpollFd, NO_EVENT};
    use crate::worker::{Shared, ThreadOptions};
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::{channel, Receiver, Sender};
    use std::sync::Mutex;
    use std::time::{Duration, Instant};
    use vhost_device_rdma_sync::Readers;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn a_worker_with_time_for_it_reads_messages_and_one_without_leaves_some() {
        let mut unread = Unread::default();
        let mut now = 0;
        // Nothing is left after a long sleep, or for long.
        for (sleep, left) in [(SHORT, false), (SHORT - 1, true), (10_000, true)] {
            unread.slept(now, now + sleep);
            assert!(!unread.is_due(now + sleep) && unread.latest().is_none());
            unread.add(5);
            now += sleep;
            unread.slept(now - sleep, now);
            assert_eq!(!unread.is_due(now), left);
            assert!(!unread.is_urgent(now + MOST_UNREAD));
            assert!(unread.is_urgent(now + MOST_UNREAD + 1));
            assert_eq!(unread.latest(), Some(now + LONGEST_LEFT));
            assert!(unread.is_due(now + LONGEST_LEFT));
            assert_eq!(unread.take().collect::<Vec<_>>(), [5]);
            assert!(unread.is_empty() && !unread.is_urgent(u64::MAX));
        }
    }

    #[test]
    fn messages_of_a_bounded_number_of_sleeps_are_left() {
        let mut unread = Unread::default();
        let mut read = 0;
        for n in 0..10 * u64::from(MOST_LEFT) {
            unread.add(n % 2);
            unread.slept(10_000 * n, 10_000 * n + 7_000);
            if unread.is_due(10_000 * n + 8_000) {
                read += 1;
                assert_eq!(unread.take().count(), 2);
            }
        }
        assert_eq!(read, 10);
        // Those of others that come less often are read in time, too.
        let (mut now, mut latest) = (0, None);
        unread.add(1);
        loop {
            unread.slept(now, now + SHORT - 1);
            now += SHORT - 1;
            let until = *latest.get_or_insert(now + LONGEST_LEFT);
            if unread.is_due(now) {
                assert!(now < until + SHORT);
                return;
            }
        }
    }

    /// Messages that the worker does not take: it only tells that it could have.
    #[derive(Debug)]
    struct Told(Mutex<Sender<()>>);

    impl Messages for Told {
        fn take_notifications(&self) {
            lock(&self.0).send(()).unwrap();
        }
    }

    fn told() -> (Arc<Told>, Receiver<()>) {
        let (sender, receiver) = channel();
        (Arc::new(Told(Mutex::new(sender))), receiver)
    }

    fn read(mut socket: &UnixStream) {
        socket.read_exact(&mut [0]).unwrap();
    }

    /// What another thread would be woken by.
    fn other(socket: &UnixStream) -> EpollFd {
        let other = EpollFd::new().unwrap();
        other.add_for(socket, EXCLUSIVE, 0).unwrap();
        other
    }

    fn is_woken(other: &EpollFd) -> bool {
        !other.wait(0, &mut [NO_EVENT]).unwrap().is_empty()
    }

    #[test]
    fn a_worker_that_sleeps_is_woken_alone() {
        let (_readers, mut each) = Readers::new(1);
        let worker = Worker::start(
            0,
            each.remove(0),
            Shared::default(),
            Duration::ZERO,
            ThreadOptions::default(),
            Arc::new(|_, failure| panic!("{failure:?}")),
        )
        .unwrap();
        let (mut client, socket) = UnixStream::pair().unwrap();
        let (messages, told) = told();
        let number = worker.add_messages(&socket, messages).unwrap();
        let other = other(&socket);
        const TIMES: usize = 40;
        let mut alone = 0;
        for _ in 0..TIMES {
            let deadline = Instant::now() + LONG;
            while !worker.is_asleep() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            // It says so before it does.
            std::thread::sleep(Duration::from_millis(5));
            client.write_all(&[0]).unwrap();
            told.recv_timeout(LONG).unwrap();
            alone += usize::from(!is_woken(&other));
            read(&socket);
        }
        assert!(alone > TIMES / 2, "{alone} times");
        worker.remove_messages(&socket, number);
        client.write_all(&[0]).unwrap();
        assert!(is_woken(&other));
        assert!(told.recv_timeout(Duration::from_millis(50)).is_err());
        worker.stop();
    }

    #[test]
    fn while_the_worker_is_awake_the_other_thread_is_woken() {
        let (_readers, mut each) = Readers::new(1);
        let shared = Shared::default();
        let (worker, _work) =
            Worker::without_thread(0, each.remove(0), shared, Duration::ZERO).unwrap();
        let (mut client, socket) = UnixStream::pair().unwrap();
        let (messages, told) = told();
        let number = worker.add_messages(&socket, messages).unwrap();
        let other = other(&socket);
        assert!(!is_woken(&other));
        client.write_all(&[0]).unwrap();
        assert!(is_woken(&other));
        // The worker finds out when it is to sleep; if there is nothing any longer, it sleeps.
        let events = |worker: &Worker| {
            let mut space = [NO_EVENT; 4];
            let events = worker.epoll.wait(0, &mut space).unwrap();
            events.iter().map(|event| event.data).collect::<Vec<_>>()
        };
        assert_eq!(events(&worker), [number]);
        worker.take_notifications(number);
        assert_eq!(told.try_recv(), Ok(()));
        read(&socket);
        client.write_all(&[0]).unwrap();
        read(&socket);
        assert!(events(&worker).is_empty());
        // Those that have gone are nobody's.
        worker.remove_messages(&socket, number);
        worker.take_notifications(number);
        assert!(told.try_recv().is_err());
    }
}
