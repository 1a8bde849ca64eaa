// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A simulated network with virtual time: frames take a while, and come in order.
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use super::{Arrived, Burst, Fate, Port};
use crate::engine::tables::Gid;
use crate::engine::vm::Segment;

type Mac = [u8; 6];

/// The frames on their way to each MAC address, with the time at which they come, and their segment.
#[derive(Debug, Default)]
struct Links(BTreeMap<Mac, VecDeque<(u64, Segment, Vec<u8>)>>);

/// A network: a switch that knows where each MAC address is.
#[derive(Debug, Clone)]
pub(in super::super) struct Network {
    links: Rc<RefCell<Links>>,
    /// How long a frame takes, nanoseconds.
    latency: u64,
}

/// A port of it.
#[derive(Debug)]
pub(in super::super) struct SimPort {
    network: Network,
    mac: Mac,
    mtu: usize,
    /// The frame that is written, where it goes, and when that began.
    written: Vec<u8>,
    segment: Segment,
    now: u64,
}

impl Network {
    /// One in which a frame takes `latency` nanoseconds.
    pub(in super::super) fn new(latency: u64) -> Self {
        Self {
            links: Rc::default(),
            latency,
        }
    }

    /// The port with a MAC address.
    pub(in super::super) fn port(&self, mac: Mac, mtu: usize) -> SimPort {
        self.links.borrow_mut().0.entry(mac).or_default();
        SimPort {
            network: self.clone(),
            mac,
            mtu,
            written: Vec::new(),
            segment: Segment::Vxlan(0),
            now: 0,
        }
    }
}

impl Port for SimPort {
    fn begin(&mut self, now: u64, segment: Segment, _: Gid, len: usize) -> Result<&mut [u8], Fate> {
        assert!(len <= self.mtu + 14, "the frame is too long");
        self.segment = segment;
        self.now = now;
        self.written.resize(len, 0);
        Ok(&mut self.written)
    }

    fn written(&mut self) -> &mut [u8] {
        &mut self.written
    }

    fn end(&mut self) -> Fate {
        let destination: &Mac = self.written.first_chunk().unwrap();
        let group = destination[0] & 1 != 0;
        // If nobody has the address, the frame is lost.
        for (mac, link) in &mut self.network.links.borrow_mut().0 {
            if mac == destination || (group && *mac != self.mac) {
                let at = self.now + self.network.latency;
                link.push_back((at, self.segment, self.written.clone()));
            }
        }
        Fate::Sent
    }

    fn flush(&mut self) -> u64 {
        0
    }

    fn receive(&mut self, now: u64, burst: &mut Burst) -> bool {
        let mut links = self.network.links.borrow_mut();
        let link = links.0.get_mut(&self.mac).unwrap();
        match link.front() {
            Some((at, ..)) if *at <= now => {
                let (_, segment, bytes) = link.pop_front().unwrap();
                *burst.bytes() = bytes;
                burst.frames.clear();
                let all = 0..burst.room.bytes.len();
                burst.frames.push(Arrived::new(segment, all));
                true
            }
            _ => false,
        }
    }

    fn timer(&self) -> Option<u64> {
        let links = self.network.links.borrow();
        links.0.get(&self.mac)?.front().map(|(at, ..)| *at)
    }
}
