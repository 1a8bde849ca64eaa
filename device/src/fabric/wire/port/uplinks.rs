// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! All ways out of this process: the tunnel between hosts, and interfaces of VMs.
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::interface::{Interface, InterfaceEnd};
use super::vxlan::{Tunnel, VxlanPort};
use super::{Burst, Fate, Port};
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
    interfaces: Vec<InterfaceEnd>,
    /// Waits for frames of interfaces; the number of an event is that of the interface.
    epoll: EpollFd,
    /// Interfaces with frames. Each gives a burst at a time.
    ready: VecDeque<u32>,
    /// Interfaces were asked for frames, and all that were there are taken.
    asked: bool,
    /// The next look at the tunnel comes before that at the interfaces.
    tunnel_first: bool,
    /// Where the frame goes that is written, and its length, bytes.
    written: (Segment, usize),
    /// What was sent by the tunnel, or by these interfaces, has perhaps not left.
    tunnel_sent: bool,
    sent: Vec<u32>,
}

impl UplinkPort {
    /// # Errors
    /// If the system has no descriptors left, or refuses a socket's options.
    pub(crate) fn new(uplinks: &Uplinks) -> io::Result<Self> {
        let epoll = EpollFd::new()?;
        let interfaces = uplinks.interfaces.iter();
        let interfaces = interfaces.map(|interface| interface.end());
        let interfaces: Vec<_> = interfaces.collect::<io::Result<_>>()?;
        for (number, interface) in (0..).zip(&interfaces) {
            epoll.add(&interface.descriptor(), number)?;
        }
        Ok(Self {
            tunnel: uplinks.tunnel.clone().map(VxlanPort::new).transpose()?,
            interfaces,
            epoll,
            ready: VecDeque::new(),
            asked: false,
            tunnel_first: true,
            written: (Segment::Own(0), 0),
            tunnel_sent: false,
            sent: Vec::new(),
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

    fn receive_by_interface(&mut self, burst: &mut Burst) -> bool {
        loop {
            let Some(number) = self.ready.pop_front() else {
                if self.ask() {
                    continue;
                }
                return false;
            };
            let Some(interface) = self.interfaces.get_mut(number as usize) else {
                continue;
            };
            if !interface.receive(Segment::Own(number), burst) {
                continue;
            }
            self.ready.push_back(number);
            return true;
        }
    }

    /// What was sent leaves now. Returns how many frames the system did not take.
    #[inline(never)]
    fn flush_sent(&mut self) -> u64 {
        let mut refused = 0;
        if std::mem::take(&mut self.tunnel_sent) {
            refused = self.tunnel.as_mut().map_or(0, VxlanPort::flush);
        }
        while let Some(number) = self.sent.pop() {
            let interface = self.interfaces.get_mut(number as usize);
            refused += interface.map_or(0, InterfaceEnd::flush);
        }
        refused
    }

    fn receive_by_tunnel(&mut self, burst: &mut Burst) -> bool {
        let tunnel = self.tunnel.as_mut();
        tunnel.is_some_and(|tunnel| tunnel.receive(burst))
    }
}

impl Port for UplinkPort {
    fn identification(&self, segment: Segment) -> u16 {
        match segment {
            Segment::Own(number) => {
                let interface = self.interfaces.get(number as usize);
                interface.map_or(0, InterfaceEnd::identification)
            }
            Segment::Vxlan(_) => 0,
        }
    }

    fn begin(
        &mut self,
        _: u64,
        segment: Segment,
        destination: Gid,
        len: usize,
    ) -> Result<&mut [u8], Fate> {
        self.written = (segment, len);
        match segment {
            Segment::Vxlan(vni) => {
                let tunnel = self.tunnel.as_mut().ok_or(Fate::Refused)?;
                tunnel.begin(vni, destination, len)
            }
            Segment::Own(number) => {
                let interface = self.interfaces.get_mut(number as usize);
                let space = interface.and_then(|interface| interface.begin(len));
                space.ok_or(Fate::Refused)
            }
        }
    }

    fn written(&mut self) -> &mut [u8] {
        let written = match self.written {
            (Segment::Vxlan(_), _) => self.tunnel.as_mut().map(VxlanPort::written),
            (Segment::Own(number), len) => {
                let interface = self.interfaces.get_mut(number as usize);
                interface.map(|interface| interface.written(len))
            }
        };
        written.unwrap_or_default()
    }

    fn end(&mut self) -> Fate {
        match self.written {
            (Segment::Vxlan(_), _) => {
                if let Some(tunnel) = &mut self.tunnel {
                    tunnel.end();
                    self.tunnel_sent = true;
                }
            }
            (Segment::Own(number), len) => {
                if let Some(interface) = self.interfaces.get_mut(number as usize) {
                    interface.end(len);
                    if self.sent.last() != Some(&number) {
                        self.sent.push(number);
                    }
                }
            }
        }
        Fate::Sent
    }

    // While nothing is sent, it is asked all the time.
    #[inline(always)]
    fn flush(&mut self) -> u64 {
        if !self.tunnel_sent && self.sent.is_empty() {
            return 0;
        }
        self.flush_sent()
    }

    fn receive(&mut self, _: u64, burst: &mut Burst) -> bool {
        self.tunnel_first = !self.tunnel_first;
        if self.tunnel_first {
            return self.receive_by_tunnel(burst) || self.receive_by_interface(burst);
        }
        self.receive_by_interface(burst) || self.receive_by_tunnel(burst)
    }

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
        let mut port = UplinkPort::new(&uplinks).unwrap();
        for (switch, count) in sockets.iter().zip([3, 0, 1]) {
            for number in 0..count {
                switch.send(&[number; 60]).unwrap();
            }
        }
        let mut came = Vec::new();
        let mut burst = Burst::default();
        while port.receive(0, &mut burst) {
            came.extend(
                burst
                    .frames()
                    .map(|(segment, frame, _)| (segment, frame[0])),
            );
        }
        let own = Segment::Own;
        assert_eq!(came, [(own(0), 0), (own(2), 0), (own(0), 1), (own(0), 2)]);
        sockets[1].send(&[9; 60]).unwrap();
        assert!(port.receive(0, &mut burst));
        assert_eq!(burst.frames().next(), Some((own(1), &[9; 60][..], None)));
        assert!(!port.receive(0, &mut burst));
        let to = [1; 16];
        assert_eq!(port.send(0, own(2), to, &[7; 60]), Fate::Sent);
        assert_eq!(port.flush(), 0);
        assert_eq!(sockets[2].recv(&mut [0; 100]).unwrap(), 60);
        for nowhere in [own(3), Segment::Vxlan(1)] {
            assert_eq!(port.send(0, nowhere, to, &[7; 60]), Fate::Refused);
        }
    }
}
