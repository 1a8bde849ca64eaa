// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target `packets`: a guest's queue pairs of all types are connected to a peer on the wire, and the
//! peer sends anything, with addresses and ICRC right or not: requests with sequence numbers around
//! the one that is due, answers to what the guest sent, and bytes. What the device sends must be
//! from the guest's address and have a right ICRC, and no memory may change but what was registered
//! for that.
use std::net::UdpSocket;

use arbitrary::{Result, Unstructured};
use vhost_device_rdma::config::{DgramConfig, InterfaceConfig, UplinksConfig};
use vhost_device_rdma::engine::vm::{Congestion, Local, Segment, Uplink};
use virtio_rdma_spec::command::opcode;
use virtio_rdma_spec::ring::{RecvWqe, SendWqe, Sge, SrdRange, UdWqe};
use virtio_rdma_spec::verbs::{access, mtu, qp_attr, qp_state, qp_type, send_flag, wr_opcode};

use crate::host::{gid, Guest, Host, FEATURES, PAGE};
use crate::neighbour::Neighbour;
use crate::queues::{attributes, Cq, Mr, Qp, Refs, Srq, QKEY, REMOTE};

/// Steps of an input.
const MOST_STEPS: usize = 300;
/// The guest, and the peer on the wire: last bytes of their GIDs and MAC addresses.
const GUEST: u8 = 1;
const PEER: u8 = 0x77;
/// The number of the peer's queue pair that is connected to the first one of the guest.
const PEER_QP: u32 = 0x700;
/// What fills memory that nobody may change.
const CANARY: u8 = 0xc5;
/// Bytes of headers before the base transport header: Ethernet, IPv6, UDP.
const HEADERS: usize = 14 + 40 + 8;
const BTH: usize = 12;
const ROCE_PORT: u16 = 4791;

/// Opcodes of what one of our devices asks another one, and answers (specification: "Missing packets").
const QUERY: u8 = 0xc0;
const REPORT: u8 = 0xc1;
/// Opcodes of reliable datagrams (`spec/srd.md`).
const DATA: u8 = 0xc4;
const ANSWER: u8 = 0xc5;
const RESET: u8 = 0xc6;
/// The queue pairs but that of reliable datagrams, each with its type, the upper bits of its opcodes on the wire, and whether it
/// has the shared receive queue.
const QPS: [(u8, u8, bool); 6] = [
    (qp_type::RC, 0x00, false),
    (qp_type::RC, 0x00, true),
    (qp_type::UC, 0x20, false),
    (qp_type::UD, 0x60, false),
    (qp_type::XRC_INI, 0xa0, false),
    (qp_type::XRC_TGT, 0xa0, false),
];

/// The guest, and the peer's end of the wire.
struct Scene {
    guest: Guest,
    switch: UdpSocket,
    /// Each with the sequence number that is due.
    qps: Vec<(Qp, u32)>,
    srd: Qp,
    /// The flow of reliable datagrams from the peer: its token, the number that is due, and the answer
    /// that was heard; and what came last of that from the guest: its token and a number.
    flow: (u64, u32, u32),
    flow_back: (u64, u32),
    srq: Srq,
    xrc_srq: Srq,
    cq: Cq,
    mr: Mr,
    read_only: Mr,
    canaries: Vec<usize>,
    /// Requests of the guest that came last: to which queue pair, and their sequence numbers.
    asked: Vec<(u32, u32)>,
    posted: u64,
}

/// Runs an input.
pub fn run(data: &[u8]) {
    let switch = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let free = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let local = free.local_addr().expect("an address");
    drop(free);
    switch.connect(local).expect("an address");
    switch.set_nonblocking(true).expect("a socket");
    let uplinks = UplinksConfig {
        wire: None,
        interfaces: vec![InterfaceConfig::Dgram(DgramConfig {
            local,
            remote: switch.local_addr().expect("an address"),
            mtu: None,
        })],
    };
    // Somebody else may have taken the address: this input is not run then.
    let Ok(mut host) = Host::with_uplinks(uplinks) else {
        return;
    };
    let mut neighbour = Neighbour::new(&host);
    let mut scene = Scene::new(&host, switch);
    let mut u = Unstructured::new(data);
    for _ in 0..MOST_STEPS {
        if u.is_empty() || scene.step(&mut host, &mut u).is_err() {
            break;
        }
        host.rounds(1);
        scene.take();
    }
    neighbour.check(&mut host);
    scene.leave(&mut host);
    neighbour.check(&mut host);
    neighbour.leave(&mut host);
}

impl Scene {
    fn new(host: &Host, switch: UdpSocket) -> Self {
        let uplink = Uplink {
            local: Local::Process,
            congestion: Congestion::Window,
            segment: Segment::Own(0),
            active_mtu: mtu::MTU_1024,
        };
        let mut guest = host.guest_with(GUEST, FEATURES, Some(uplink));
        let context = guest.context().expect("a context");
        let pd = guest.create(opcode::CREATE_PD).expect("a PD");
        let cq = guest.cq().expect("a completion queue");
        let mr = guest.mr(pd, access::LOCAL_WRITE | REMOTE, 4);
        let read_only = guest.mr(pd, access::REMOTE_READ, 1).expect("a region");
        let canaries = vec![read_only.page, guest.take_pages(1)];
        for page in &canaries {
            guest.view.write(page * PAGE, &[CANARY; PAGE]);
        }
        let refs = Refs {
            pd,
            cq: cq.number,
            ..Refs::default()
        };
        let srq = guest.srq(context, refs).expect("an SRQ");
        let xrcd = guest.create(opcode::CREATE_XRCD).expect("an XRC domain");
        let in_domain = Refs { xrcd, ..refs };
        let xrc_srq = guest.srq(context, in_domain).expect("an SRQ");
        let mut qps = Vec::new();
        for (number, (of, _, shared)) in (0..).zip(QPS) {
            let refs = Refs {
                srq: if shared { srq.number } else { 0 },
                xrcd: if of == qp_type::XRC_TGT { xrcd } else { 0 },
                cq: if of == qp_type::XRC_TGT { 0 } else { cq.number },
                pd: if of == qp_type::XRC_TGT { 0 } else { pd },
            };
            let qp = guest.qp(of, context, refs).expect("a queue pair");
            connect(&guest, &qp, number);
            qps.push((qp, 0));
        }
        let refs = Refs {
            srq: 0,
            xrcd: 0,
            ..refs
        };
        let srd = guest.qp(qp_type::SRD, context, refs).expect("a queue pair");
        connect(&guest, &srd, 0);
        Self {
            guest,
            switch,
            qps,
            srd,
            flow: (1 << 32, 0, 0),
            flow_back: (0, 0),
            srq,
            xrc_srq,
            cq,
            mr: mr.expect("a region"),
            read_only,
            canaries,
            asked: Vec::new(),
            posted: 0,
        }
    }

    fn step(&mut self, host: &mut Host, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary()? {
            0..=89u8 => self.request(u)?,
            90..=109 => self.reliable(u)?,
            110..=159 => self.answer(u)?,
            160..=199 => self.post_send(u)?,
            200..=219 => self.post_recv(u)?,
            220..=239 => {
                host.rounds(usize::from(u.int_in_range(1..=8u8)?));
                while self.cq.take(&self.guest).is_some() {}
            }
            240..=245 => self.connect_again(u)?,
            246..=249 => {
                self.guest.rnic.stop();
                host.rounds(1);
                self.guest.start();
            }
            _ => {
                let len = u.int_in_range(0..=200usize)?;
                let frame = u.bytes(len.min(u.len()))?;
                self.send(frame);
            }
        }
        Ok(())
    }

    /// The peer sends a request.
    fn request(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let which = u.choose_index(QPS.len())?;
        let (_, service, _) = QPS[which];
        let operation = match u.arbitrary()? {
            0..=239u8 => *u.choose(&[
                0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 19, 20, 22, 23, 28, 29,
            ])?,
            _ => u.int_in_range(0..=31)?,
        };
        let service = if u.ratio(1, 30)? {
            u.arbitrary()?
        } else {
            service
        };
        let mut body = Vec::new();
        if service == 0xa0 {
            body.extend(self.xrc_srq.number.to_be_bytes());
        }
        if service == 0x60 {
            let qkey: u32 = if u.ratio(1, 8)? { u.arbitrary()? } else { QKEY };
            body.extend(qkey.to_be_bytes());
            body.extend(PEER_QP.to_be_bytes());
        }
        if operation == 28 {
            body.extend(u.int_in_range(0..=40u32)?.to_be_bytes());
        }
        if matches!(operation, 6 | 10 | 11 | 12 | 28 | 29) {
            self.reth(u, &mut body)?;
        }
        if matches!(operation, 19 | 20) {
            let mut target = Vec::new();
            self.reth(u, &mut target)?;
            body.extend(&target[..12]);
            body.extend(u.arbitrary::<u64>()?.to_be_bytes());
            body.extend(u.arbitrary::<u64>()?.to_be_bytes());
        }
        if matches!(operation, 3 | 5 | 9 | 11 | 22 | 23) {
            let key = if operation > 20 {
                self.read_only.key
            } else {
                7
            };
            body.extend(key.to_be_bytes());
        }
        let carries = !matches!(operation, 12 | 19 | 20 | 28);
        let len = match u.arbitrary()? {
            0..=99u8 => 1024,
            100..=149 => 8,
            150..=199 => 0,
            _ => u.int_in_range(0..=1400usize)?,
        };
        body.resize(body.len() + if carries { len } else { 0 }, 0x3d);
        let pad = (4 - body.len() % 4) % 4;
        body.resize(body.len() + pad, 0);
        let (qp, due) = &mut self.qps[which];
        let distance = match u.arbitrary()? {
            0..=199u8 => 0,
            _ => i32::from(u.arbitrary::<i8>()?),
        };
        let psn = due.wrapping_add_signed(distance) & 0x00ff_ffff;
        if distance == 0 {
            *due = due.wrapping_add(1);
        }
        let number = qp.number;
        let flags = (pad as u8) << 4 | u8::from(u.arbitrary::<bool>()?) << 7;
        let asks = u32::from(u.arbitrary::<bool>()?) << 31;
        self.packet(service | operation, flags, number, asks | psn, &body, u)
    }

    /// The peer sends a packet of reliable datagrams.
    fn reliable(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let psn = u32::from(u.arbitrary::<u8>()?);
        let version = if u.ratio(1, 30)? { u.arbitrary()? } else { 1u8 };
        let (token_back, number_back) = self.flow_back;
        let mut body = Vec::new();
        match u.arbitrary()? {
            0..=159u8 => {}
            kind => {
                let opcode = if kind < 250 { ANSWER } else { RESET };
                let (paths, refusals) = (u.int_in_range(0..=4u8)?, u.int_in_range(0..=4u8)?);
                body.extend([version, u.arbitrary::<u8>()? & 1]);
                body.extend(if opcode == ANSWER {
                    [paths, refusals]
                } else {
                    [0; 2]
                });
                body.extend(token_back.to_be_bytes());
                if opcode == ANSWER {
                    let near = |u: &mut Unstructured<'_>| -> Result<u32> {
                        Ok(number_back.wrapping_add_signed(u.arbitrary::<i8>()?.into()))
                    };
                    body.extend(near(u)?.to_be_bytes());
                    for _ in 0..32 {
                        body.push(u.arbitrary()?);
                    }
                    body.extend(u32::from(u.arbitrary::<u8>()?).to_be_bytes());
                    body.extend(u32::from(u.arbitrary::<u8>()?).to_be_bytes());
                    for path in 0..paths {
                        body.extend([path, 0, 0, u.arbitrary()?]);
                    }
                    for _ in 0..refusals {
                        body.extend(near(u)?.to_be_bytes());
                        body.extend(u.arbitrary::<u32>()?.to_be_bytes());
                    }
                }
                return self.packet(opcode, 0, 0, psn, &body, u);
            }
        }
        let (token, due, heard) = &mut self.flow;
        match u.arbitrary()? {
            0..=9u8 => (*token, *due, *heard) = (token.wrapping_add(1 << 32), 0, 0),
            10..=29 => *heard = heard.wrapping_add(1),
            _ => {}
        }
        let distance = match u.arbitrary()? {
            0..=199u8 => 0,
            _ => i32::from(u.arbitrary::<i8>()?),
        };
        let number = due.wrapping_add_signed(distance);
        *due = due.wrapping_add(u32::from(distance == 0));
        let (token, heard) = (*token, *heard);
        let kind = u.int_in_range(0..=5u8)?;
        let mut range = Vec::new();
        self.reth(u, &mut range)?;
        let (addr, rest) = range.split_at(8);
        let (rkey, range_len) = rest.split_at(4);
        let len: usize = match kind {
            0 => u.int_in_range(0..=1024)?,
            1 | 3 => *u.choose(&[1024, 8, 0, 100])?,
            _ => 0,
        };
        let length = match (kind, u.arbitrary()?) {
            (2, _) | (_, 0..=19u8) => range_len.to_vec(),
            _ => (len as u32).to_be_bytes().to_vec(),
        };
        let offset = if u.ratio(1, 8)? { u.arbitrary()? } else { 0u32 };
        let qkey: u32 = if u.ratio(1, 8)? { u.arbitrary()? } else { QKEY };
        body.extend([
            version,
            kind,
            u.arbitrary::<u8>()? & 3,
            u.int_in_range(0..=8u8)?,
        ]);
        body.extend(token.to_be_bytes());
        for word in [
            number,
            heard,
            PEER_QP,
            qkey,
            u32::from(u.arbitrary::<u8>()? % 4),
        ] {
            body.extend(word.to_be_bytes());
        }
        body.extend(length);
        body.extend(offset.to_be_bytes());
        body.extend([7; 4]);
        body.extend(rkey);
        body.extend(addr);
        body.resize(body.len() + len, 0x3e);
        let pad = (4 - body.len() % 4) % 4;
        body.resize(body.len() + pad, 0);
        let number = self.srd.number;
        self.packet(DATA, (pad as u8) << 4, number, psn, &body, u)
    }

    /// An address, a key and a length: mostly of memory that may be accessed.
    fn reth(&self, u: &mut Unstructured<'_>, body: &mut Vec<u8>) -> Result<()> {
        let choice: u8 = u.arbitrary()?;
        let mr = if choice < 220 {
            &self.mr
        } else {
            &self.read_only
        };
        let offset = match choice % 4 {
            0 => 0,
            1 => u64::from(u.arbitrary::<u8>()?) * 8,
            2 => mr.length - 8,
            _ => u.arbitrary()?,
        };
        body.extend(mr.iova.wrapping_add(offset).to_be_bytes());
        let key = if choice % 16 == 15 {
            u.arbitrary()?
        } else {
            mr.key
        };
        body.extend(key.to_be_bytes());
        let length = match u.arbitrary()? {
            0..=99u8 => 1024,
            100..=199 => u32::from(u.arbitrary::<u16>()? % 5000),
            _ => u.arbitrary()?,
        };
        body.extend(length.to_be_bytes());
        Ok(())
    }

    /// The peer answers something that the guest asked.
    fn answer(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let Some((to, psn)) = self.asked.len().checked_sub(1).and_then(|last| {
            let back = u.int_in_range(0..=last.min(7)).ok()?;
            self.asked.get(last - back).copied()
        }) else {
            return Ok(());
        };
        let which = (to.wrapping_sub(PEER_QP) as usize) % QPS.len();
        let (_, service, _) = QPS[which];
        let operation = *u.choose(&[17u8, 17, 17, 13, 14, 15, 16, 18, QUERY, REPORT])?;
        let mut body = Vec::new();
        if operation >= QUERY {
            body.extend(*b"vrdm");
            body.extend(u.int_in_range(0..=4u32)?.to_be_bytes());
            for _ in 0..u.int_in_range(0..=17u8)? {
                let first = psn.wrapping_add_signed(u.arbitrary::<i8>()?.into());
                let packets = match u.arbitrary()? {
                    0..=9u8 => u.arbitrary()?,
                    packets => u32::from(packets % 16),
                };
                body.extend([first, packets].map(u32::to_be_bytes).concat());
            }
            let number = self.qps[which].0.number;
            return self.packet(operation, 0, number, psn, &body, u);
        }
        if operation != 14 {
            let syndrome: u8 = match u.arbitrary()? {
                0..=119u8 => 0x1f,
                120..=159 => 0x20 | u.int_in_range(0..=31u8)?,
                160..=199 => 0x60 | u.int_in_range(0..=7u8)?,
                _ => u.arbitrary()?,
            };
            body.extend((u32::from(syndrome) << 24 | u.int_in_range(0..=20u32)?).to_be_bytes());
        }
        match operation {
            13..=16 => {
                let len = *u.choose(&[1024, 1024, 8, 0, 100, 1100])?;
                body.resize(body.len() + len, 0x2a);
            }
            18 => body.extend([1; 8]),
            _ => {}
        }
        let distance = if u.ratio(1, 4)? {
            i32::from(u.arbitrary::<i8>()?)
        } else {
            0
        };
        let psn = psn.wrapping_add_signed(distance) & 0x00ff_ffff;
        let number = self.qps[which].0.number;
        self.packet(service | operation, 0, number, psn, &body, u)
    }

    /// Sends a packet to a queue pair of the guest, which may be damaged before or after its ICRC is
    /// made.
    fn packet(
        &self,
        opcode: u8,
        flags: u8,
        qp: u32,
        psn: u32,
        body: &[u8],
        u: &mut Unstructured<'_>,
    ) -> Result<()> {
        let length = 8 + BTH + body.len() + 4;
        let mut frame = Vec::with_capacity(14 + 40 + length);
        frame.extend(mac(GUEST));
        frame.extend(mac(PEER));
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        frame.extend((length as u16).to_be_bytes());
        frame.extend([17, 64]);
        frame.extend(gid(PEER));
        frame.extend(gid(GUEST));
        frame.extend(0xc000u16.to_be_bytes());
        frame.extend(ROCE_PORT.to_be_bytes());
        frame.extend((length as u16).to_be_bytes());
        frame.extend([0, 0]);
        frame.extend([opcode, flags, 0xff, 0xff]);
        frame.extend(qp.to_be_bytes());
        frame.extend(psn.to_be_bytes());
        frame.extend(body);
        let damage: u8 = u.arbitrary()?;
        if damage < 24 {
            let at = HEADERS + usize::from(u.arbitrary::<u8>()?) % (frame.len() - HEADERS);
            frame[at] ^= u.arbitrary::<u8>()?;
        }
        frame.extend(icrc(&frame[14..]));
        if (24..32).contains(&damage) {
            let at = usize::from(u.arbitrary::<u16>()?) % frame.len();
            frame[at] ^= u.arbitrary::<u8>()?;
        } else if (32..36).contains(&damage) {
            frame.truncate(usize::from(u.arbitrary::<u16>()?) % frame.len());
        }
        self.send(&frame);
        Ok(())
    }

    fn send(&self, frame: &[u8]) {
        // The socket may be full, as a network may be.
        let _ = self.switch.send(frame);
    }

    /// Takes what the device has sent.
    fn take(&mut self) {
        let mut space = [0; 65536];
        while let Ok(len) = self.switch.recv(&mut space) {
            let frame = &space[..len];
            assert_eq!(frame[6..12], mac(GUEST), "it is from the guest");
            assert_eq!(frame[22..38], gid(GUEST), "it is from the guest");
            let (covered, crc) = frame[14..].split_at(len - 14 - 4);
            assert_eq!(crc, icrc(covered), "its ICRC is right");
            let word = |at: usize| {
                let bytes = frame[HEADERS + at..].first_chunk().expect("a header");
                u32::from_be_bytes(*bytes) & 0x00ff_ffff
            };
            if frame[HEADERS] >= DATA {
                if frame[HEADERS] == DATA {
                    let at = HEADERS + BTH + 4;
                    let token = frame[at..].first_chunk().expect("a header");
                    let number = frame[at + 8..].first_chunk().expect("a header");
                    self.flow_back = (u64::from_be_bytes(*token), u32::from_be_bytes(*number));
                }
            } else if !(13..=18).contains(&(frame[HEADERS] & 31)) {
                self.asked.push((word(4), word(8)));
            }
        }
    }

    fn sge(&self, u: &mut Unstructured<'_>) -> Result<Sge> {
        Ok(Sge {
            addr: self.mr.iova + u64::from(u.arbitrary::<u8>()?),
            length: u32::from(u.arbitrary::<u16>()? % 4000),
            lkey: self.mr.key,
        })
    }

    /// The guest sends a reliable datagram.
    fn post_reliable(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        self.posted += 1;
        let opcode = *u.choose(&[
            wr_opcode::SEND,
            wr_opcode::SEND_WITH_IMM,
            wr_opcode::RDMA_WRITE,
            wr_opcode::RDMA_WRITE_WITH_IMM,
            wr_opcode::RDMA_READ,
        ])?;
        let wqe = UdWqe {
            opcode,
            flags: send_flag::SIGNALED,
            count: 1,
            wr_id: self.posted,
            dgid: gid(PEER),
            remote_qpn: PEER_QP,
            remote_qkey: QKEY,
            hop_limit: 64,
            ..UdWqe::default()
        };
        let range = SrdRange {
            remote_addr: self.mr.iova,
            rkey: self.mr.key,
            reserved: 0,
        };
        let sge = self.sge(u)?;
        let entry = [&wqe.to_bytes()[..], &range.to_bytes(), &sge.to_bytes()];
        self.srd.sq.post(&self.guest, &entry.concat());
        self.guest.ring_qp(&self.srd);
        Ok(())
    }

    fn post_send(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let which = u.choose_index(QPS.len())?;
        if which == QPS.len() - 1 {
            // XRC_TGT sends nothing itself.
            return self.post_reliable(u);
        }
        let sge = self.sge(u)?;
        self.posted += 1;
        let all = [
            wr_opcode::SEND,
            wr_opcode::SEND_WITH_IMM,
            wr_opcode::RDMA_WRITE,
            wr_opcode::RDMA_WRITE_WITH_IMM,
            wr_opcode::RDMA_READ,
            wr_opcode::ATOMIC_CMP_AND_SWP,
            wr_opcode::ATOMIC_WRITE,
            wr_opcode::FLUSH,
        ];
        let datagram = QPS[which].0 == qp_type::UD;
        let opcode = *u.choose(&all[..if datagram { 2 } else { all.len() }])?;
        let atomic = matches!(
            opcode,
            wr_opcode::ATOMIC_CMP_AND_SWP | wr_opcode::ATOMIC_WRITE
        );
        let wqe = SendWqe {
            opcode,
            flags: send_flag::SIGNALED,
            count: u16::from(opcode != wr_opcode::FLUSH),
            wr_id: self.posted,
            remote_addr: self.mr.iova,
            rkey: self.mr.key,
            ..SendWqe::default()
        };
        let sge = Sge {
            length: if atomic { 8 } else { sge.length },
            ..sge
        };
        let to_peer = UdWqe {
            opcode,
            flags: send_flag::SIGNALED,
            count: 1,
            wr_id: self.posted,
            dgid: gid(PEER),
            remote_qpn: PEER_QP + which as u32,
            remote_qkey: QKEY,
            hop_limit: 64,
            ..UdWqe::default()
        };
        let mut entry = if datagram {
            to_peer.to_bytes().to_vec()
        } else {
            wqe.to_bytes().to_vec()
        };
        entry.extend(sge.to_bytes());
        let (qp, _) = &mut self.qps[which];
        qp.sq.post(&self.guest, &entry);
        self.guest.ring_qp(qp);
        Ok(())
    }

    fn post_recv(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        self.posted += 1;
        let wqe = RecvWqe {
            count: 1,
            wr_id: self.posted,
            ..RecvWqe::default()
        };
        let entry = [&wqe.to_bytes()[..], &self.sge(u)?.to_bytes()].concat();
        let guest = &self.guest;
        match u.choose_index(6)? {
            5 => {
                self.srd.rq.post(guest, &entry);
                guest.ring_qp(&self.srd);
            }
            0 => {
                self.srq.rq.post(guest, &entry);
                guest.ring_srq(&self.srq);
            }
            1 => {
                self.xrc_srq.rq.post(guest, &entry);
                guest.ring_srq(&self.xrc_srq);
            }
            other => {
                let (qp, _) = &mut self.qps[[0, 2, 3][other - 2]];
                qp.rq.post(guest, &entry);
                guest.ring_qp(qp);
            }
        }
        Ok(())
    }

    /// A queue pair begins anew.
    fn connect_again(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let which = u.choose_index(QPS.len())?;
        let (qp, due) = &mut self.qps[which];
        let reset = attributes(qp.qp_type, qp_state::RESET, [0; 16], 0);
        if self.guest.modify(qp.number, reset).is_ok() {
            *due = 0;
            qp.sq.reset(&self.guest);
            qp.rq.reset(&self.guest);
            connect(&self.guest, qp, which as u32);
        }
        Ok(())
    }

    fn leave(self, host: &mut Host) {
        for page in &self.canaries {
            let bytes = self.guest.view.get(page * PAGE, PAGE);
            assert!(bytes.iter().all(|byte| *byte == CANARY), "page {page}");
        }
        host.remove(self.guest);
    }
}

/// Connects a queue pair to that of the peer with this number.
fn connect(guest: &Guest, qp: &Qp, number: u32) {
    for state in [qp_state::INIT, qp_state::RTR, qp_state::RTS] {
        let (mut attr, mask) = attributes(qp.qp_type, state, gid(PEER), PEER_QP + number);
        attr.path_mtu = mtu::MTU_1024;
        // Long enough for the peer to answer, short enough for an input to see the end.
        attr.timeout = if mask & qp_attr::TIMEOUT == 0 { 0 } else { 8 };
        attr.retry_cnt = if mask & qp_attr::RETRY_CNT == 0 { 0 } else { 3 };
        guest.modify(qp.number, (attr, mask)).expect("a connection");
    }
}

fn mac(number: u8) -> [u8; 6] {
    [0x52, 0x54, 0, 0, 0, number]
}

/// The ICRC of a packet over IPv6 from its IP header on: what may change on the way counts as ones.
fn icrc(packet: &[u8]) -> [u8; 4] {
    let mut masked = packet.to_vec();
    for (at, mask) in [(0, 0x0f), (1, 0xff), (2, 0xff), (3, 0xff), (7, 0xff)] {
        masked[at] |= mask;
    }
    for at in [46, 47, 52] {
        masked[at] = 0xff;
    }
    let mut crc = crc32fast::Hasher::new();
    crc.update(&[0xff; 8]);
    crc.update(&masked);
    crc.finalize().to_le_bytes()
}
