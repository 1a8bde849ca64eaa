// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! All ways out of this process: the tunnel between hosts, and interfaces of VMs.
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::interface::Interface;
use super::vxlan::{Tunnel, VxlanPort};
use super::{Fate, Port, LONGEST};
use crate::engine::tables::Gid;
use crate::engine::vm::Segment;
use crate::epoll_fd::{EpollFd, NO_EVENT};

/// Interfaces that are asked for at a time whether frames have come.
const AT_A_TIME: usize = 64;

/// All ways out of this process, open.
#[derive(Debug, Clone, Default)]
pub struct Uplinks {
    /// The tunnel between hosts, if there is one.
    pub tunnel: Option<Arc<Tunnel>>,
    /// Interfaces of VMs, by their numbers.
    pub interfaces: Vec<Arc<Interface>>,
}

impl Uplinks {
    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tunnel.is_none() && self.interfaces.is_empty()
    }
}

/// The port to all of them.
#[derive(Debug)]
pub(crate) struct UplinkPort {
    tunnel: Option<VxlanPort>,
    interfaces: Vec<Arc<Interface>>,
    /// Waits for frames of interfaces; the number of an event is that of the interface.
    epoll: EpollFd,
    /// Interfaces with frames. Each gives one at a time.
    ready: VecDeque<u32>,
    /// Interfaces were asked for frames, and all that were there are taken.
    asked: bool,
    /// The frame that is read.
    read: Vec<u8>,
}

impl UplinkPort {
    /// # Errors
    /// If the system has no descriptors left.
    pub(crate) fn new(uplinks: Uplinks) -> io::Result<Self> {
        let Uplinks { tunnel, interfaces } = uplinks;
        let epoll = EpollFd::new()?;
        for (number, interface) in (0..).zip(&interfaces) {
            epoll.add(interface.socket(), number)?;
        }
        let longest = if interfaces.is_empty() { 0 } else { LONGEST };
        Ok(Self {
            tunnel: tunnel.map(VxlanPort::new),
            interfaces,
            epoll,
            ready: VecDeque::new(),
            asked: false,
            read: vec![0; longest],
        })
    }

    /// Has `epoll` wait for frames, too; the event has the number `data`.
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn wait_in(&self, epoll: &EpollFd, data: u64) -> io::Result<()> {
        if let Some(tunnel) = &self.tunnel {
            epoll.add(tunnel.socket(), data)?;
        }
        if !self.interfaces.is_empty() {
            epoll.add(&self.epoll, data)?;
        }
        Ok(())
    }

    /// Asks interfaces for frames. Returns whether there are any.
    fn ask(&mut self) -> bool {
        if self.interfaces.is_empty() || std::mem::replace(&mut self.asked, true) {
            self.asked = false;
            return false;
        }
        let mut space = [NO_EVENT; AT_A_TIME];
        let ready = self.epoll.wait(0, &mut space).unwrap_or_default();
        let number = |event: &epoll::Event| u32::try_from(event.data).ok();
        self.ready.extend(ready.iter().filter_map(number));
        self.asked = !self.ready.is_empty();
        self.asked
    }

    fn receive_by_interface(&mut self, frame: &mut Vec<u8>) -> Option<Segment> {
        loop {
            let Some(number) = self.ready.pop_front() else {
                if self.ask() {
                    continue;
                }
                return None;
            };
            let interface = self.interfaces.get(number as usize)?;
            let length = interface.receive(&mut self.read);
            if let Some(bytes) = length.and_then(|length| self.read.get(..length)) {
                self.ready.push_back(number);
                frame.clear();
                frame.extend_from_slice(bytes);
                return Some(Segment::Own(number));
            }
        }
    }
}

impl Port for UplinkPort {
    fn send(&mut self, _: u64, segment: Segment, destination: Gid, frame: &[u8]) -> Fate {
        match segment {
            Segment::Vxlan(vni) => {
                let tunnel = self.tunnel.as_mut();
                tunnel.map_or(Fate::Refused, |tunnel| tunnel.send(vni, destination, frame))
            }
            Segment::Own(number) => {
                let interface = self.interfaces.get(number as usize);
                interface.map_or(Fate::Refused, |interface| interface.send(frame))
            }
        }
    }

    fn receive(&mut self, _: u64, frame: &mut Vec<u8>) -> Option<Segment> {
        let by_tunnel = self
            .tunnel
            .as_mut()
            .and_then(|tunnel| tunnel.receive(frame));
        by_tunnel
            .map(Segment::Vxlan)
            .or_else(|| self.receive_by_interface(frame))
    }

    #[cfg(test)]
    fn timer(&self) -> Option<u64> {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn interfaces_that_have_frames_take_turns() {
        let sockets = [0; 3].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
        let interfaces = sockets.iter().map(|switch| {
            let free = UdpSocket::bind("127.0.0.1:0").unwrap();
            let local = free.local_addr().unwrap();
            drop(free);
            switch.connect(local).unwrap();
            Interface::open(local, switch.local_addr().unwrap()).unwrap()
        });
        let uplinks = Uplinks {
            interfaces: interfaces.collect(),
            ..Uplinks::default()
        };
        let mut port = UplinkPort::new(uplinks).unwrap();
        for (switch, count) in sockets.iter().zip([3, 0, 1]) {
            for number in 0..count {
                switch.send(&[number; 60]).unwrap();
            }
        }
        let mut came = Vec::new();
        let mut frame = Vec::new();
        while let Some(segment) = port.receive(0, &mut frame) {
            came.push((segment, frame[0]));
        }
        let own = Segment::Own;
        assert_eq!(came, [(own(0), 0), (own(2), 0), (own(0), 1), (own(0), 2)]);
        sockets[1].send(&[9; 60]).unwrap();
        assert_eq!(port.receive(0, &mut frame), Some(own(1)));
        assert_eq!(port.receive(0, &mut frame), None);
        let to = [1; 16];
        assert_eq!(port.send(0, own(2), to, &[7; 60]), Fate::Sent);
        assert_eq!(sockets[2].recv(&mut [0; 100]).unwrap(), 60);
        for nowhere in [own(3), Segment::Vxlan(1)] {
            assert_eq!(port.send(0, nowhere, to, &[7; 60]), Fate::Refused);
        }
    }
}
