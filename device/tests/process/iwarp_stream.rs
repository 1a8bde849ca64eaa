// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections of iWARP whose other end breaks the rules of the RFCs: what it is told, what becomes
//! of the queue pair, and that nobody else notices.
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use vhost_device_rdma_bare::core::command::{IwAccept, IwListen, IwNextEvent};
use vhost_device_rdma_bare::spec::command::status;
use vhost_device_rdma_bare::spec::iwarp::{self, iw_event};
use vhost_device_rdma_bare::spec::ring::SendWqe;
use vhost_device_rdma_bare::spec::verbs::{access, qp_state, send_flag, wc_status, wr_opcode};
use vhost_device_rdma_bare::{Mr, Pd, Vm};

use crate::common::{
    assert_footprint_falls_to, assert_reaches, assert_status, assert_success, pattern, Side,
    SideOptions, NOTHING, TIMEOUT,
};
use crate::iwarp::{
    accept, destroy_listen, endpoint, event, guest, listen, next, private, try_connect, Bed, PORT,
};
use crate::iwarp_peer::{
    atomic, enhanced, fpdu, read_request, reply, request, send, tagged, Codes, Peer, Untagged,
    ATOMIC_REQUEST, ATOMIC_RESPONSE, CRC, ENHANCED, IMMEDIATE, MARKERS, PEER_TO_PEER, READ_REQUEST,
    READ_RESPONSE, REJECTED, RTR_READ, RTR_WRITE, SEND, SEND_INVALIDATE, TERMINATE, WRITE,
};

/// RDMA READs that the peer may have under way.
const DEPTH: u16 = 2;
/// What memory is full of that nobody may write to.
const CANARY: u8 = 0xc5;

/// How a peer begins.
#[derive(Clone, Copy, Debug)]
enum Begins {
    Revision1,
    Revision2,
    PeerToPeer,
}

const ALL_BEGIN: [Begins; 3] = [Begins::Revision1, Begins::Revision2, Begins::PeerToPeer];

impl Begins {
    fn request(self) -> Vec<u8> {
        let depths = |flags| enhanced(flags | 16, RTR_WRITE | 16);
        match self {
            Self::Revision1 => request(1, CRC, b"hello"),
            Self::Revision2 => request(2, CRC | ENHANCED, &enhanced(16, 16)),
            Self::PeerToPeer => request(2, CRC | ENHANCED, &depths(PEER_TO_PEER)),
        }
    }
}

/// The VM that listens, and peers of its that are none of ours.
struct Victim {
    bed: Bed,
    listener: u32,
}

impl Victim {
    fn new() -> Self {
        Self::on(Bed::new(false))
    }

    fn on(bed: Bed) -> Self {
        let listener = bed.listen(1);
        Self { bed, listener }
    }

    fn vm(&self) -> &Arc<Vm> {
        &self.bed.vms[1]
    }

    fn address(&self) -> SocketAddr {
        (self.bed.hosts[1], PORT).into()
    }

    /// A queue pair of the VM that has accepted a peer.
    fn accept(&self, begins: Begins) -> (Side, Peer) {
        let side = self.bed.side(1);
        let mut peer = Peer::connect(self.address());
        peer.write(&begins.request());
        let request = event(self.vm(), iw_event::CONNECT_REQUEST);
        accept(self.vm(), request.connection, &side, DEPTH, b"").unwrap();
        let reply = peer.frame().expect("a reply");
        assert!(reply.reply && reply.flags & CRC != 0 && reply.flags & REJECTED == 0);
        if let Begins::PeerToPeer = begins {
            peer.put(&[tagged(WRITE, true, 1, 0, &[])]);
        }
        event(self.vm(), iw_event::ESTABLISHED);
        assert_eq!(side.qp.state().unwrap(), qp_state::RTS);
        (side, peer)
    }

    /// Others can connect, and messages move.
    fn assert_works(&self) {
        let (side, mut peer) = self.accept(Begins::PeerToPeer);
        side.qp.post_recv(77, &[side.mr.sge(0, 64)]).unwrap();
        peer.put(&[send(1, b"still here")]);
        let cqe = side.received();
        assert_success(&cqe);
        assert_eq!((cqe.wr_id, cqe.byte_len), (77, 10));
        drop(peer);
        assert_eq!(event(self.vm(), iw_event::CLOSE).status, 0);
    }

    /// It is unharmed, and keeps nothing.
    fn leave(mut self) {
        self.assert_works();
        destroy_listen(self.vm(), self.listener).unwrap();
        assert_eq!(next(self.vm()), None);
        self.bed.assert_unharmed();
        for vm in ["vm0", "vm1"] {
            let socket = self.bed.directory.join(vm);
            assert_footprint_falls_to(&self.bed.processes[0], &socket, 0);
        }
    }
}

/// What a peer may try to reach, and what it may not.
struct Target {
    side: Side,
    /// Without remote access.
    private: Mr,
    /// Of another protection domain.
    foreign: Mr,
    /// For atomic operations.
    word: Mr,
}

impl Target {
    fn new(vm: &Arc<Vm>, side: Side) -> Self {
        let remote = access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ;
        let private = side.pd.register(4096, access::LOCAL_WRITE).unwrap();
        let other = Pd::new(vm).unwrap();
        let foreign = other.register(4096, remote).unwrap();
        let word = side.pd.register(4096, remote | access::REMOTE_ATOMIC);
        let new = Self {
            side,
            private,
            foreign,
            word: word.unwrap(),
        };
        for mr in new.all() {
            mr.write(0, &[CANARY; 4096]);
        }
        new
    }

    fn all(&self) -> [&Mr; 4] {
        [&self.side.mr, &self.private, &self.foreign, &self.word]
    }

    #[track_caller]
    fn assert_untouched(&self, name: &str) {
        for mr in self.all() {
            assert!(mr.read(0, 4096) == [CANARY; 4096], "{name}");
        }
    }
}

/// What a peer sends, and what it is told.
struct Case {
    name: &'static str,
    bytes: Vec<u8>,
    codes: Option<Codes>,
    /// How the receive of 64 bytes completes that was posted.
    receive: u8,
}

const FLUSHED: u8 = wc_status::WR_FLUSH_ERR;

fn case(name: &'static str, ulpdus: &[Vec<u8>], codes: Codes) -> Case {
    let bytes: Vec<_> = ulpdus.iter().map(|ulpdu| fpdu(ulpdu)).collect();
    Case {
        name,
        bytes: bytes.concat(),
        codes: Some(codes),
        receive: FLUSHED,
    }
}

/// All that is refused before anything of it is placed. The reasons are those of RFC 5040, 4.8
/// (layer 0), RFC 5041, 7.2 (1) and RFC 5044, 8 (2).
fn refused(target: &Target) -> Vec<Case> {
    let mr = &target.side.mr;
    let (at, key) = (mr.iova, mr.rkey);
    let of = Untagged::of;
    let data = [0x11; 64];
    let changed = |mut ulpdu: Vec<u8>, byte: usize, to: u8| {
        ulpdu[byte] = to;
        ulpdu
    };
    let write = |key, at| tagged(WRITE, true, key, at, &data);
    let one = |name, ulpdu, codes| case(name, &[ulpdu], codes);
    let atomic_to =
        |mr: &Mr, offset| of(ATOMIC_REQUEST).with(&atomic(0, mr.rkey, mr.iova + offset));
    let mut cases = vec![
        // MPA.
        Case {
            bytes: {
                let mut bytes = fpdu(&write(key, at));
                *bytes.last_mut().unwrap() ^= 1;
                bytes
            },
            ..case("a wrong CRC", &[], (2, 0, 2))
        },
        Case {
            bytes: {
                let mut bytes = fpdu(&write(key, at));
                bytes[20] ^= 0x80;
                bytes
            },
            ..case("a byte that was changed", &[], (2, 0, 2))
        },
        Case {
            bytes: [fpdu(&write(key, at ^ 1 << 60)), vec![0xff; 5000]].concat(),
            ..case("nonsense behind what is refused", &[], (1, 1, 1))
        },
        // Versions.
        one("DDP 0, tagged", changed(write(key, at), 0, 0xc0), (1, 1, 4)),
        one("DDP 2, tagged", changed(write(key, at), 0, 0xc2), (1, 1, 4)),
        one("DDP 0", changed(send(1, &data), 0, 0x40), (1, 2, 6)),
        one("DDP 3", changed(send(1, &data), 0, 0x43), (1, 2, 6)),
        one("RDMAP 0, tagged", changed(write(key, at), 1, 0), (0, 2, 5)),
        one("RDMAP 2", changed(send(1, &data), 1, 0x83), (0, 2, 5)),
        // Opcodes.
        one(
            "a tagged SEND",
            tagged(SEND, true, key, at, &data),
            (0, 2, 6),
        ),
        one(
            "a tagged READ",
            tagged(READ_REQUEST, true, key, at, &data),
            (0, 2, 6),
        ),
        one("a WRITE without a tag", of(WRITE).with(&data), (0, 2, 6)),
        one(
            "a response without a tag",
            of(READ_RESPONSE).with(&data),
            (0, 2, 6),
        ),
        one("opcode 12", of(12).with(&data), (0, 2, 6)),
        one(
            "opcode 15, tagged",
            tagged(15, true, key, at, &data),
            (0, 2, 6),
        ),
        // Queues, sequence numbers and offsets.
        one(
            "a SEND to queue 1",
            Untagged {
                queue: 1,
                ..of(SEND)
            }
            .with(&data),
            (1, 2, 1),
        ),
        one(
            "a SEND to queue 4096",
            Untagged {
                queue: 4096,
                ..of(SEND)
            }
            .with(&data),
            (1, 2, 1),
        ),
        one(
            "a READ to queue 0",
            Untagged {
                queue: 0,
                ..of(READ_REQUEST)
            }
            .with(&read_request(1, key, at, 8)[18..]),
            (1, 2, 1),
        ),
        one("MSN 0", send(0, &data), (1, 2, 3)),
        one("MSN 2", send(2, &data), (1, 2, 3)),
        one("MSN 2^31", send(1 << 31, &data), (1, 2, 3)),
        one("MSN 0 of a READ", read_request(0, key, at, 8), (1, 2, 3)),
        one("MSN 2 of a READ", read_request(2, key, at, 8), (1, 2, 3)),
        one(
            "MSN 2 of an atomic operation",
            Untagged {
                msn: 2,
                ..of(ATOMIC_REQUEST)
            }
            .with(&atomic(0, target.word.rkey, target.word.iova)),
            (1, 2, 3),
        ),
        one(
            "a SEND from the middle on",
            Untagged {
                offset: 4,
                ..of(SEND)
            }
            .with(&data),
            (1, 2, 4),
        ),
        one(
            "an offset of a READ",
            Untagged {
                offset: 8,
                ..of(READ_REQUEST)
            }
            .with(&read_request(1, key, at, 8)[18..]),
            (1, 2, 4),
        ),
        one(
            "a segment of nothing",
            Untagged {
                last: false,
                ..of(SEND)
            }
            .with(&[]),
            (1, 2, 4),
        ),
        // Lengths.
        one(
            "a READ that goes on",
            Untagged {
                last: false,
                ..of(READ_REQUEST)
            }
            .with(&read_request(1, key, at, 8)[18..]),
            (1, 2, 5),
        ),
        one(
            "a READ with more",
            [read_request(1, key, at, 8), vec![0; 4]].concat(),
            (1, 2, 5),
        ),
        one(
            "immediate data of 9 bytes",
            of(IMMEDIATE).with(&[0; 9]),
            (1, 2, 5),
        ),
        Case {
            receive: wc_status::LOC_LEN_ERR,
            ..one("a SEND that is too long", send(1, &[1; 65]), (1, 2, 5))
        },
        // Keys of WRITEs.
        one("an invalid STag", write(key ^ 0x100, at), (1, 1, 0)),
        one("STag 0", write(0, at), (1, 1, 0)),
        one("before the region", write(key, at - 1), (1, 1, 1)),
        one(
            "behind the region",
            write(key, at + (1 << 20) - 63),
            (1, 1, 1),
        ),
        one(
            "around the end of all addresses",
            write(key, u64::MAX - 8),
            (1, 1, 1),
        ),
        one(
            "without access",
            write(target.private.rkey, target.private.iova),
            (0, 1, 2),
        ),
        one(
            "of another protection domain",
            write(target.foreign.rkey, target.foreign.iova),
            (1, 1, 2),
        ),
        // Those of READs.
        one(
            "READ: an invalid STag",
            read_request(1, key ^ 0x100, at, 8),
            (0, 1, 0),
        ),
        one(
            "READ: behind the region",
            read_request(1, key, at + (1 << 20) - 7, 8),
            (0, 1, 1),
        ),
        one(
            "READ: too long",
            read_request(1, key, at, u32::MAX),
            (0, 1, 1),
        ),
        one(
            "READ: around",
            read_request(1, key, u64::MAX - 3, 8),
            (0, 1, 1),
        ),
        one(
            "READ: without access",
            read_request(1, target.private.rkey, target.private.iova, 8),
            (0, 1, 2),
        ),
        one(
            "READ: of another protection domain",
            read_request(1, target.foreign.rkey, target.foreign.iova, 8),
            (0, 1, 3),
        ),
        case(
            "more READs than agreed to",
            &[1, 2, 3].map(|msn| read_request(msn, key, at, 100_000)),
            (1, 2, 2),
        ),
        // Answers that nobody has asked for.
        one(
            "a response",
            tagged(READ_RESPONSE, true, key, at, &data),
            (1, 1, 0),
        ),
        one(
            "a response to STag 1",
            tagged(READ_RESPONSE, true, 1, 0, &data),
            (1, 1, 0),
        ),
        one(
            "an atomic response",
            of(ATOMIC_RESPONSE).with(&[0; 12]),
            (0, 2, 6),
        ),
        // Atomic operations.
        one("atomic: not aligned", atomic_to(&target.word, 4), (0, 2, 7)),
        one("atomic: without access", atomic_to(mr, 0), (0, 1, 2)),
        one(
            "atomic: of another protection domain",
            atomic_to(&target.foreign, 0),
            (0, 1, 3),
        ),
        one(
            "atomic: behind the region",
            atomic_to(&target.word, 4096),
            (0, 1, 1),
        ),
        one(
            "atomic: an invalid STag",
            of(ATOMIC_REQUEST).with(&atomic(0, 0x7654_3210, at)),
            (0, 1, 0),
        ),
        one(
            "atomic: an unknown operation",
            of(ATOMIC_REQUEST).with(&atomic(7, target.word.rkey, target.word.iova)),
            (0, 2, 6),
        ),
        one(
            "a key that there is not to invalidate",
            Untagged {
                stag: 0x7654_3210,
                ..of(SEND_INVALIDATE)
            }
            .with(&[]),
            (0, 1, 9),
        ),
        one("a ULPDU of nothing", Vec::new(), (0, 2, 0xff)),
    ];
    // Headers that are not there as a whole.
    for length in 1..18 {
        cases.push(one(
            "a SEND cut short",
            send(1, &[])[..length].to_vec(),
            (0, 2, 0xff),
        ));
    }
    for length in 1..14 {
        cases.push(one(
            "a WRITE cut short",
            write(key, at)[..length].to_vec(),
            (0, 2, 0xff),
        ));
    }
    for length in [18, 30, 45] {
        let read = read_request(1, key, at, 8)[..length].to_vec();
        cases.push(one("a READ cut short", read, (0, 2, 0xff)));
    }
    for length in [18, 30, 69] {
        let whole = atomic_to(&target.word, 0)[..length].to_vec();
        cases.push(one("an atomic operation cut short", whole, (0, 2, 0xff)));
    }
    // Who says that it refuses something is told nothing.
    for said in [&[][..], &[0x01], &[0x01, 0x02, 0xe0, 0, 0, 1], &[0xff; 300]] {
        cases.push(Case {
            codes: None,
            ..case(
                "a Terminate message",
                &[of(TERMINATE).with(said)],
                (0, 0, 0),
            )
        });
    }
    cases
}

// D-IWP-002, D-IWP-003, D-IWP-004.
#[test]
fn what_is_malformed_is_refused_with_the_reason() {
    let victim = Victim::new();
    for begins in ALL_BEGIN {
        let mut at = 0;
        loop {
            let (side, mut peer) = victim.accept(begins);
            let target = Target::new(victim.vm(), side);
            let side = &target.side;
            let cases = refused(&target);
            let Some(case) = cases.get(at) else {
                // This one has done nothing wrong.
                drop(peer);
                event(victim.vm(), iw_event::CLOSE);
                break;
            };
            at += 1;
            let name = format!("{}, {begins:?}", case.name);
            side.qp.post_recv(5, &[side.mr.sge(8192, 64)]).unwrap();
            peer.write(&case.bytes);
            let said = peer.end();
            assert_eq!(said.as_ref().map(|(codes, _)| *codes), case.codes, "{name}");
            assert_eq!(
                event(victim.vm(), iw_event::CLOSE).status,
                status::ECONNRESET,
                "{name}"
            );
            let cqe = side.received();
            assert_eq!(cqe.status, case.receive, "{name}: {cqe:?}");
            assert_eq!(side.qp.state().unwrap(), qp_state::ERR, "{name}");
            assert_eq!(side.recv_cq.poll(), None, "{name}");
            target.assert_untouched(&name);
        }
    }
    victim.leave();
}

/// The message that ends a connection has the headers of what it is about.
// D-IWP-002.
#[test]
fn a_refusal_has_the_headers_of_what_it_is_about() {
    let victim = Victim::new();
    let key = 0x7654_3210;
    for (ulpdu, control, about) in [
        (send(1, b"hello"), 0xc0, 18),
        (tagged(WRITE, true, key, 5, &[1; 40]), 0xc0, 14),
        (read_request(1, key, 5, 8), 0xe0, 46),
    ] {
        let (side, mut peer) = victim.accept(Begins::Revision1);
        peer.put(std::slice::from_ref(&ulpdu));
        let (_, headers) = peer.end().expect("a reason");
        let length = (ulpdu.len() as u16).to_be_bytes();
        let expected = [&[control, 0][..], &length, &ulpdu[..about]].concat();
        assert_eq!(headers, expected);
        event(victim.vm(), iw_event::CLOSE);
        drop(side);
    }
    victim.leave();
}

/// What came before stays, and of what is refused nothing is placed.
// D-IWP-002.
#[test]
fn what_came_before_is_carried_out() {
    let victim = Victim::new();
    let of = Untagged::of(SEND);
    let first = |payload: &[u8]| Untagged { last: false, ..of }.with(payload);
    // Each with the reason, and how the receives complete.
    for (name, ulpdus, codes, statuses) in [
        (
            "no receive",
            vec![send(1, &[1; 8]), send(2, &[2; 8]), send(3, &[3; 8])],
            (1, 2, 2),
            [wc_status::SUCCESS; 2],
        ),
        (
            "the second segment has a wrong offset",
            vec![first(&[1; 8]), Untagged { offset: 4, ..of }.with(&[2; 8])],
            (1, 2, 4),
            [FLUSHED; 2],
        ),
        (
            "the second segment is of another message",
            vec![first(&[1; 8]), send(2, &[2; 8])],
            (1, 2, 3),
            [FLUSHED; 2],
        ),
        (
            "immediate data in the middle of a message",
            vec![first(&[1; 8]), Untagged::of(IMMEDIATE).with(&[9; 8])],
            (1, 2, 4),
            [FLUSHED; 2],
        ),
        (
            "the second segment is too long",
            vec![first(&[1; 8]), Untagged { offset: 8, ..of }.with(&[2; 57])],
            (1, 2, 5),
            [wc_status::LOC_LEN_ERR, FLUSHED],
        ),
        (
            "the same again",
            vec![send(1, &[1; 8]), send(1, &[2; 8])],
            (1, 2, 3),
            [wc_status::SUCCESS, FLUSHED],
        ),
    ] {
        let (side, mut peer) = victim.accept(Begins::Revision2);
        side.mr.write(0, &[CANARY; 256]);
        for (wr_id, at) in [(1, 0), (2, 64)] {
            side.qp.post_recv(wr_id, &[side.mr.sge(at, 64)]).unwrap();
        }
        peer.put(&ulpdus);
        assert_eq!(peer.end().map(|(codes, _)| codes), Some(codes), "{name}");
        event(victim.vm(), iw_event::CLOSE);
        for (wr_id, status) in (1..).zip(statuses) {
            let cqe = side.received();
            assert_eq!((cqe.wr_id, cqe.status), (wr_id, status), "{name}: {cqe:?}");
        }
        assert_eq!(side.mr.read(0, 8), [1; 8], "{name}");
        assert_eq!(side.mr.read(8, 56), [CANARY; 56], "{name}");
        assert_eq!(side.mr.read(128, 128), [CANARY; 128], "{name}");
        side.assert_quiet();
    }
    victim.leave();
}

/// Makes a segment of the name and the offset that were asked for.
type Answer<'a> = &'a dyn Fn(u32, u64) -> Vec<u8>;

/// The VM asks, and what comes is no answer to that.
// D-IWP-002.
#[test]
fn answers_that_are_none_are_refused() {
    let victim = Victim::new();
    let response = |last, stag, offset, length: usize| {
        tagged(READ_RESPONSE, last, stag, offset, &vec![2; length])
    };
    let word = |msn, id: u32| {
        let body = [&id.to_be_bytes()[..], &[7; 8]].concat();
        Untagged {
            msn,
            ..Untagged::of(ATOMIC_RESPONSE)
        }
        .with(&body)
    };
    // To an RDMA READ of 100 bytes, or to an atomic operation.
    let cases: [(&str, bool, Answer<'_>, Codes); 12] = [
        (
            "another STag",
            false,
            &|stag, to| response(true, stag ^ 1, to, 100),
            (1, 1, 0),
        ),
        (
            "another offset",
            false,
            &|stag, to| response(true, stag, to + 1, 100),
            (1, 1, 1),
        ),
        (
            "before it",
            false,
            &|stag, to| response(true, stag, to.wrapping_sub(1), 100),
            (1, 1, 1),
        ),
        (
            "too much",
            false,
            &|stag, to| response(true, stag, to, 101),
            (1, 1, 1),
        ),
        (
            "too little",
            false,
            &|stag, to| response(true, stag, to, 99),
            (1, 1, 1),
        ),
        (
            "nothing",
            false,
            &|stag, to| response(true, stag, to, 0),
            (1, 1, 1),
        ),
        (
            "no end",
            false,
            &|stag, to| response(false, stag, to, 100),
            (1, 1, 1),
        ),
        ("of another kind", false, &|_, _| word(1, 1), (0, 2, 6)),
        ("another MSN", true, &|id, _| word(2, id), (1, 2, 3)),
        ("another id", true, &|id, _| word(1, id ^ 8), (0, 2, 6)),
        (
            "data for a word",
            true,
            &|id, _| response(true, id, 0, 8),
            (1, 1, 0),
        ),
        (
            "short",
            true,
            &|_, _| Untagged::of(ATOMIC_RESPONSE).with(&[0; 11]),
            (0, 2, 0xff),
        ),
    ];
    for (name, is_atomic, answer, codes) in cases {
        let (side, mut peer) = victim.accept(Begins::Revision2);
        side.mr.write(0, &[CANARY; 200]);
        let wqe = SendWqe {
            opcode: if is_atomic {
                wr_opcode::ATOMIC_FETCH_AND_ADD
            } else {
                wr_opcode::RDMA_READ
            },
            flags: send_flag::SIGNALED,
            wr_id: 9,
            remote_addr: 0x8000,
            rkey: 0x1234,
            ..SendWqe::default()
        };
        let length = if is_atomic { 8 } else { 100 };
        side.qp.post_send(&wqe, &[side.mr.sge(0, length)]).unwrap();
        let asked = peer.ulpdu().expect("a request");
        let word_at = |at: usize| u32::from_be_bytes(asked[at..at + 4].try_into().unwrap());
        let (name_at, opcode) = if is_atomic {
            (22, ATOMIC_REQUEST)
        } else {
            (18, READ_REQUEST)
        };
        assert_eq!(asked[..2], [0x41, 0x40 | opcode]);
        let to = u64::from_be_bytes(asked[22..30].try_into().unwrap());
        peer.put(&[answer(word_at(name_at), to)]);
        assert_eq!(peer.end().map(|(codes, _)| codes), Some(codes), "{name}");
        event(victim.vm(), iw_event::CLOSE);
        let cqe = side.sent();
        assert_eq!((cqe.wr_id, cqe.status), (9, FLUSHED), "{name}: {cqe:?}");
        assert_eq!(side.qp.state().unwrap(), qp_state::ERR);
        assert_eq!(side.mr.read(0, 200), [CANARY; 200], "{name}");
    }
    victim.leave();
}

/// What the peer refuses completes with an error that says so.
#[test]
fn the_peer_refuses() {
    let victim = Victim::new();
    for (said, wc) in [
        ([0x01, 0x02, 0, 0], wc_status::REM_ACCESS_ERR),
        ([0x02, 0x06, 0, 0], wc_status::REM_OP_ERR),
        // As siw of Linux writes it.
        ([0x10, 0x02, 1, 0], wc_status::REM_ACCESS_ERR),
    ] {
        let (side, mut peer) = victim.accept(Begins::Revision2);
        side.qp.read(9, &[side.mr.sge(0, 8)], 0, 5).unwrap();
        peer.ulpdu().expect("a request");
        peer.put(&[Untagged::of(TERMINATE).with(&said)]);
        assert_eq!(peer.end(), None);
        assert_status(&side.sent(), wc);
        assert_eq!(
            event(victim.vm(), iw_event::CLOSE).status,
            status::ECONNRESET
        );
    }
    victim.leave();
}

// D-IWP-002, D-IWP-006.
#[test]
fn a_stream_is_cut_at_each_byte() {
    let victim = Victim::new();
    let whole = fpdu(&send(1, b"12345678"));
    for by_reset in [false, true] {
        for length in 0..=whole.len() {
            let (side, mut peer) = victim.accept(Begins::PeerToPeer);
            side.mr.write(0, &[CANARY; 64]);
            side.qp.post_recv(5, &[side.mr.sge(0, 64)]).unwrap();
            peer.write(&whole[..length]);
            let came = length == whole.len();
            if by_reset {
                if came {
                    // A reset takes with it what was not read.
                    assert_success(&side.received());
                }
                peer.reset();
            } else {
                peer.finish();
                assert_eq!(peer.end(), None);
                if came {
                    assert_success(&side.received());
                }
            }
            let close = event(victim.vm(), iw_event::CLOSE);
            let orderly = !by_reset && (length == 0 || came);
            let expected = if orderly { 0 } else { status::ECONNRESET };
            assert_eq!(
                close.status, expected,
                "{length} bytes, by reset: {by_reset}"
            );
            if !came {
                assert_status(&side.received(), FLUSHED);
                assert_eq!(side.mr.read(0, 64), [CANARY; 64]);
            }
            assert_eq!(side.qp.state().unwrap(), qp_state::ERR);
        }
    }
    victim.leave();
}

#[test]
fn a_slow_peer_sends_byte_by_byte() {
    let victim = Victim::new();
    for begins in ALL_BEGIN {
        let side = victim.bed.side(1);
        let mut peer = Peer::connect(victim.address());
        let slowly = |peer: &mut Peer, bytes: &[u8]| {
            for byte in bytes {
                peer.write(&[*byte]);
            }
        };
        slowly(&mut peer, &begins.request());
        let request = event(victim.vm(), iw_event::CONNECT_REQUEST);
        accept(victim.vm(), request.connection, &side, DEPTH, b"").unwrap();
        peer.frame().expect("a reply");
        if let Begins::PeerToPeer = begins {
            slowly(&mut peer, &fpdu(&tagged(WRITE, true, 1, 0, &[])));
        }
        event(victim.vm(), iw_event::ESTABLISHED);
        let data = pattern(5, 1000);
        side.qp.post_recv(5, &[side.mr.sge(0, 1000)]).unwrap();
        let write = tagged(WRITE, true, side.mr.rkey, side.mr.iova + 2000, &data);
        slowly(&mut peer, &fpdu(&write));
        let (front, back) = data.split_at(500);
        let of = Untagged::of(SEND);
        slowly(
            &mut peer,
            &fpdu(&Untagged { last: false, ..of }.with(front)),
        );
        slowly(&mut peer, &fpdu(&Untagged { offset: 500, ..of }.with(back)));
        assert_success(&side.received());
        assert_eq!(side.mr.read(0, 1000), data);
        assert_eq!(side.mr.read(2000, 1000), data);
        drop(peer);
        event(victim.vm(), iw_event::CLOSE);
    }
    victim.leave();
}

/// Requests that get no reply, or one that rejects them, and which the driver is not told of.
// D-IWP-002.
#[test]
fn requests_that_are_none_are_not_told_of() {
    let victim = Victim::new();
    let good = Begins::PeerToPeer.request();
    let changed = |byte: usize, to: u8| {
        let mut bytes = good.clone();
        bytes[byte] = to;
        bytes
    };
    let data = fpdu(&send(1, b"early"));
    for (name, bytes) in [
        ("another key", changed(3, b'!')),
        ("a reply", reply(2, CRC | ENHANCED, &enhanced(1, 1))),
        ("revision 0", changed(17, 0)),
        ("revision 3", changed(17, 3)),
        ("private data of 513 bytes", request(2, CRC, &[0; 513])),
        ("private data of 65535 bytes", changed(18, 0xff)),
        (
            "no room for IRD and ORD",
            request(2, CRC | ENHANCED, &[0; 3]),
        ),
        (
            "data before the reply",
            [good.clone(), data.clone()].concat(),
        ),
        ("cut short", good[..good.len() - 1].to_vec()),
    ] {
        let mut peer = Peer::connect(victim.address());
        peer.write(&bytes);
        if name == "cut short" {
            peer.finish();
        }
        assert_eq!(peer.frame(), None, "{name}");
        assert_eq!(next(victim.vm()), None, "{name}");
    }
    // Markers are not to be had.
    let mut peer = Peer::connect(victim.address());
    peer.write(&request(1, CRC | MARKERS, b""));
    let rejects = peer.frame().expect("a reply");
    assert!(rejects.reply && rejects.flags & REJECTED != 0);
    assert_eq!(rejects.revision, 1);
    peer.assert_closed();
    assert_eq!(next(victim.vm()), None);
    // The driver was told of this one.
    let mut peer = Peer::connect(victim.address());
    peer.write(&good);
    let request = event(victim.vm(), iw_event::CONNECT_REQUEST);
    peer.write(&data);
    assert_eq!(peer.frame(), None);
    let side = victim.bed.side(1);
    let late = accept(victim.vm(), request.connection, &side, 1, b"");
    assert_eq!(late.unwrap_err().status(), Some(status::ENOENT));
    drop(side);
    victim.leave();
}

#[test]
fn requests_say_what_the_peer_can_do() {
    let victim = Victim::new();
    // The flags of the request, its private data; what the driver and the peer get to know.
    for (revision, flags, data, depths, told) in [
        (1, 0, b"abc".to_vec(), None, b"abc".to_vec()),
        (2, 0, vec![9; 255], None, vec![9; 255]),
        (
            2,
            ENHANCED,
            [enhanced(3, 1), vec![8; 5]].concat(),
            Some((2, 2)),
            vec![8; 5],
        ),
        (1, CRC, vec![1; 512], None, vec![1; 255]),
    ] {
        let side = victim.bed.side(1);
        let mut peer = Peer::connect(victim.address());
        peer.write(&request(revision, flags, &data));
        let asks = event(victim.vm(), iw_event::CONNECT_REQUEST);
        assert_eq!(private(&asks), told);
        if depths.is_some() {
            assert_eq!((asks.ord, asks.ird), (3, 1));
        }
        accept(victim.vm(), asks.connection, &side, DEPTH, b"ok").unwrap();
        let reply = peer.frame().expect("a reply");
        assert_eq!(reply.revision, revision);
        // The device wants a CRC even if the peer does not.
        assert_eq!(reply.flags, CRC | flags & ENHANCED);
        let depths = depths.map(|(ird, ord)| enhanced(ird, ord));
        assert_eq!(
            reply.private,
            [depths.unwrap_or_default(), b"ok".to_vec()].concat()
        );
        event(victim.vm(), iw_event::ESTABLISHED);
        drop(peer);
        event(victim.vm(), iw_event::CLOSE);
    }
    victim.leave();
}

/// Soft-iWARP, as the initiator, takes what is right behind the reply for an error.
#[test]
fn an_initiator_that_is_silent_is_left_alone_for_a_moment() {
    let victim = Victim::new();
    for silent in [true, false] {
        let side = victim.bed.side(1);
        let mut peer = Peer::connect(victim.address());
        peer.write(&request(2, CRC | ENHANCED, &enhanced(1, 1)));
        let request = event(victim.vm(), iw_event::CONNECT_REQUEST);
        let begin = std::time::Instant::now();
        accept(victim.vm(), request.connection, &side, DEPTH, b"").unwrap();
        peer.frame().expect("a reply");
        side.qp.post_recv(1, &[side.mr.sge(0, 8)]).unwrap();
        if !silent {
            peer.put(&[send(1, b"first")]);
            assert_success(&side.received());
        }
        event(victim.vm(), iw_event::ESTABLISHED);
        let took = begin.elapsed();
        assert!(
            !silent || took >= std::time::Duration::from_millis(50),
            "{took:?}"
        );
        side.qp.send(2, &[side.mr.sge(0, 1)]).unwrap();
        assert_success(&side.sent());
        assert!(peer.ulpdu().is_some());
        drop(peer);
        event(victim.vm(), iw_event::CLOSE);
    }
    victim.leave();
}

/// A peer that wants a connection with a peer to peer begins with a message that the VM may refuse.
#[test]
fn the_first_message_of_a_peer_is_refused() {
    let victim = Victim::new();
    for (first, codes) in [
        (send(2, &[]), (1, 2, 3)),
        (send(1, &[]), (1, 2, 2)),
        (Vec::new(), (0, 2, 0xff)),
    ] {
        let side = victim.bed.side(1);
        let mut peer = Peer::connect(victim.address());
        peer.write(&Begins::PeerToPeer.request());
        let request = event(victim.vm(), iw_event::CONNECT_REQUEST);
        accept(victim.vm(), request.connection, &side, DEPTH, b"").unwrap();
        peer.frame().expect("a reply");
        // Until then the VM sends nothing.
        assert_eq!(next(victim.vm()), None);
        assert_eq!(side.qp.state().unwrap(), qp_state::INIT);
        peer.put(&[first]);
        assert_eq!(peer.end().map(|(codes, _)| codes), Some(codes));
        event(victim.vm(), iw_event::ESTABLISHED);
        event(victim.vm(), iw_event::CLOSE);
        assert_eq!(side.qp.state().unwrap(), qp_state::ERR);
    }
    // Or it says nothing.
    for by_reset in [false, true] {
        let side = victim.bed.side(1);
        let mut peer = Peer::connect(victim.address());
        peer.write(&Begins::PeerToPeer.request());
        let request = event(victim.vm(), iw_event::CONNECT_REQUEST);
        accept(victim.vm(), request.connection, &side, DEPTH, b"").unwrap();
        peer.frame().expect("a reply");
        if by_reset {
            peer.reset();
        }
        let close = event(victim.vm(), iw_event::CLOSE);
        assert_eq!(close.connection, request.connection);
        assert_eq!(side.qp.state().unwrap(), qp_state::ERR);
    }
    victim.leave();
}

/// VMs may connect to the test, and offer that either end sends first.
const TO_THE_TEST: &str = "peers = ['127.0.0.0/8']\npeer-to-peer = true";

/// A peer that a VM connects to.
struct Passive {
    listener: TcpListener,
    port: u16,
}

impl Passive {
    fn new() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        Self { listener, port }
    }

    /// A queue pair of the first VM asks.
    fn asked(&self, bed: &Bed) -> (Side, Peer) {
        let side = bed.side(0);
        let to = endpoint(Ipv4Addr::LOCALHOST.into(), self.port);
        try_connect(&bed.vms[0], &side, to, DEPTH, b"may I?").unwrap();
        let (stream, _) = self.listener.accept().unwrap();
        let mut peer = Peer::of(stream);
        let asks = peer.frame().expect("a request");
        assert!(!asks.reply && asks.revision == 2);
        assert_eq!(asks.flags, CRC | ENHANCED);
        assert_eq!(asks.private[4..], *b"may I?");
        let ird = u16::from_be_bytes([asks.private[0], asks.private[1]]);
        assert_eq!(ird, PEER_TO_PEER | DEPTH);
        (side, peer)
    }
}

/// Soft-iWARP does not look at what comes at once after its reply.
#[test]
fn a_peer_that_has_replied_is_left_alone_for_a_moment() {
    let bed = Bed::with(false, TO_THE_TEST);
    let passive = Passive::new();
    let (side, mut peer) = passive.asked(&bed);
    let write = enhanced(PEER_TO_PEER | 1, RTR_WRITE | 1);
    let begin = std::time::Instant::now();
    peer.write(&reply(2, CRC | ENHANCED, &write));
    // The first message, by which it is known that either end may send.
    assert_eq!(peer.ulpdu().unwrap(), tagged(WRITE, true, 1, 0, &[]));
    assert!(begin.elapsed() >= std::time::Duration::from_millis(10));
    assert_eq!(event(&bed.vms[0], iw_event::CONNECT_REPLY).status, 0);
    drop((side, peer));
}

/// What a VM gets for a reply.
// D-IWP-001, D-IWP-002, D-IWP-003.
#[test]
fn replies_of_all_kinds() {
    let mut bed = Bed::with(false, TO_THE_TEST);
    let passive = Passive::new();
    let refused = status::ECONNREFUSED;
    let reset = status::ECONNRESET;
    let write = enhanced(PEER_TO_PEER | 1, RTR_WRITE | 1);
    for (name, bytes, expected) in [
        ("revision 1", reply(1, CRC, b""), 0),
        ("revision 2", reply(2, CRC | ENHANCED, &enhanced(1, 1)), 0),
        ("peer to peer", reply(2, CRC | ENHANCED, &write), 0),
        (
            "depths not negotiated",
            reply(2, CRC | ENHANCED, &enhanced(0x3fff, 0x3fff)),
            0,
        ),
        ("rejected", reply(2, CRC | REJECTED, b"no"), refused),
        ("no CRC", reply(2, ENHANCED, &enhanced(1, 1)), reset),
        (
            "markers",
            reply(2, CRC | MARKERS | ENHANCED, &enhanced(1, 1)),
            reset,
        ),
        ("another key", b"MPA ID Rap Frame????".to_vec(), reset),
        ("a request", request(2, CRC, b""), reset),
        ("revision 7", reply(7, CRC, b""), reset),
        ("too long", reply(2, CRC, &[0; 513]), reset),
        ("nothing", Vec::new(), reset),
        ("cut short", reply(2, CRC, b"12")[..21].to_vec(), reset),
    ] {
        let (side, mut peer) = passive.asked(&bed);
        peer.write(&bytes);
        if matches!(name, "nothing" | "cut short") {
            peer.finish();
        }
        let came = event(&bed.vms[0], iw_event::CONNECT_REPLY);
        assert_eq!(status::name(came.status), status::name(expected), "{name}");
        if expected != 0 {
            assert_eq!(side.qp.state().unwrap(), qp_state::INIT, "{name}");
            peer.assert_closed();
            continue;
        }
        assert_eq!(side.qp.state().unwrap(), qp_state::RTS, "{name}");
        if name == "peer to peer" {
            assert_eq!(peer.ulpdu().unwrap(), tagged(WRITE, true, 1, 0, &[]));
        }
        // It sends what it has to.
        side.mr.write(0, b"good");
        side.qp.send(3, &[side.mr.sge(0, 4)]).unwrap();
        assert_eq!(peer.ulpdu().unwrap(), send(1, b"good"), "{name}");
        drop(peer);
        event(&bed.vms[0], iw_event::CLOSE);
        assert_eq!(side.qp.state().unwrap(), qp_state::ERR);
    }
    // The peer wants a first message that was not offered, or more READs under way.
    for (other, codes) in [
        (enhanced(PEER_TO_PEER | 1, RTR_READ | 1), (2, 0, 7)),
        (enhanced(1, DEPTH + 1), (2, 0, 6)),
    ] {
        let (side, mut peer) = passive.asked(&bed);
        peer.write(&reply(2, CRC | ENHANCED, &other));
        assert_eq!(peer.end().map(|(codes, _)| codes), Some(codes));
        assert_eq!(event(&bed.vms[0], iw_event::CONNECT_REPLY).status, reset);
        assert_eq!(side.qp.state().unwrap(), qp_state::INIT);
    }
    // What is behind the reply is taken for what it is.
    for (ulpdu, codes) in [(send(1, b"early"), None), (send(2, b""), Some((1, 2, 3)))] {
        let (side, mut peer) = passive.asked(&bed);
        side.qp.post_recv(8, &[side.mr.sge(0, 64)]).unwrap();
        peer.write(&[reply(1, CRC, b""), fpdu(&ulpdu)].concat());
        assert_eq!(event(&bed.vms[0], iw_event::CONNECT_REPLY).status, 0);
        if codes.is_some() {
            assert_eq!(peer.end().map(|(codes, _)| codes), codes);
            assert_status(&side.received(), FLUSHED);
        } else {
            assert_success(&side.received());
            drop(peer);
        }
        event(&bed.vms[0], iw_event::CLOSE);
    }
    bed.assert_unharmed();
    let socket = bed.directory.join("vm0");
    assert_footprint_falls_to(&bed.processes[0], &socket, 0);
}

/// A peer that reads nothing keeps nobody else waiting.
// D-IWP-006.
#[test]
fn a_peer_takes_nothing() {
    let victim = Victim::new();
    let (side, mut stuck) = victim.accept(Begins::Revision2);
    // Its window is full long before all is answered, and of what the VM writes.
    let long = 1 << 20;
    let (at, key) = (side.mr.iova, side.mr.rkey);
    stuck.put(&[1, 2].map(|msn| read_request(msn, key, at, long)));
    for wr_id in 0..32 {
        let sge = side.mr.sge(0, long);
        side.qp.write(wr_id, &[sge], 0x1000, 0x77).unwrap();
    }
    std::thread::sleep(NOTHING);
    let others: Vec<_> = (0..4).map(|_| victim.accept(Begins::Revision1)).collect();
    for round in 1..=20 {
        for (side, _) in &others {
            side.qp.post_recv(round, &[side.mr.sge(0, 64)]).unwrap();
            side.qp
                .write(round, &[side.mr.sge(0, 64)], 0x1000, 0x77)
                .unwrap();
        }
        let start = std::time::Instant::now();
        let mut others = others.iter();
        others.by_ref().for_each(|(side, peer)| {
            let mut peer = Peer::of(peer.0.try_clone().unwrap());
            peer.put(&[send(round as u32, b"go on")]);
            assert_eq!(peer.ulpdu().unwrap().len(), 14 + 64);
            assert_success(&side.received());
            assert_success(&side.sent());
        });
        assert!(start.elapsed() < TIMEOUT / 4);
    }
    // One more message that is not as it should be: there is no way to tell the peer, and no need.
    stuck.put(&[send(9, b"")]);
    assert_eq!(
        event(victim.vm(), iw_event::CLOSE).status,
        status::ECONNRESET
    );
    assert_eq!(side.qp.state().unwrap(), qp_state::ERR);
    drop(others);
    for _ in 0..4 {
        event(victim.vm(), iw_event::CLOSE);
    }
    drop((side, stuck));
    victim.leave();
}

/// A queue pair whose peer takes nothing is destroyed like any other.
// D-IWP-005, D-IWP-006.
#[test]
fn a_queue_pair_leaves_a_peer_that_takes_nothing() {
    let victim = Victim::new();
    for how in 0..3 {
        let (side, mut stuck) = victim.accept(Begins::Revision2);
        let (at, key) = (side.mr.iova, side.mr.rkey);
        stuck.put(&[1, 2].map(|msn| read_request(msn, key, at, 1 << 20)));
        for wr_id in 0..16 {
            let sge = side.mr.sge(0, 1 << 20);
            side.qp.write(wr_id, &[sge], 0x1000, 0x77).unwrap();
        }
        std::thread::sleep(NOTHING);
        match how {
            0 => drop(side),
            1 => side.qp.set_state(qp_state::RESET).unwrap(),
            _ => {
                side.qp.set_state(qp_state::ERR).unwrap();
                assert_reaches(&side.qp, qp_state::ERR);
            }
        }
        event(victim.vm(), iw_event::CLOSE);
    }
    victim.leave();
}

/// A peer that goes on sending when its connection is over keeps nobody waiting.
// D-IWP-006.
#[test]
fn a_peer_does_not_stop() {
    let victim = Victim::new();
    let flooding: Vec<_> = (0..2)
        .map(|_| {
            let (side, mut peer) = victim.accept(Begins::Revision1);
            let flood = std::thread::spawn(move || {
                use std::io::Write;
                peer.put(&[send(7, b"")]);
                let bytes = vec![0x55; 1 << 20];
                let mut sent = 0;
                while peer.0.write_all(&bytes).is_ok() {
                    sent += 1;
                }
                sent
            });
            (side, flood)
        })
        .collect();
    let (side, mut peer) = (victim.bed.side(1), Peer::connect(victim.address()));
    peer.write(&Begins::Revision1.request());
    // The events come in any order.
    let mut closed = 0;
    let start = std::time::Instant::now();
    let mut round = 0;
    while closed < 2 || round < 50 {
        assert!(start.elapsed() < TIMEOUT);
        match next(victim.vm()) {
            Some(event) if event.kind == iw_event::CONNECT_REQUEST => {
                accept(victim.vm(), event.connection, &side, DEPTH, b"").unwrap();
                peer.frame().expect("a reply");
            }
            Some(event) if event.kind == iw_event::CLOSE => closed += 1,
            Some(event) => assert_eq!(event.kind, iw_event::ESTABLISHED),
            None => {}
        }
        if side.qp.state().unwrap() == qp_state::RTS {
            round += 1;
            let before = std::time::Instant::now();
            side.qp.post_recv(1, &[side.mr.sge(0, 64)]).unwrap();
            peer.put(&[send(round, b"go on")]);
            assert_success(&side.received());
            let took = before.elapsed();
            assert!(took.as_millis() < 1000, "{took:?}");
        }
    }
    for (side, flood) in flooding {
        flood.join().unwrap();
        assert_eq!(side.qp.state().unwrap(), qp_state::ERR);
    }
    drop(peer);
    event(victim.vm(), iw_event::CLOSE);
    drop(side);
    victim.leave();
}

fn descriptors(process: u32) -> usize {
    let open = std::fs::read_dir(format!("/proc/{process}/fd"));
    open.unwrap().count()
}

// D-IWP-006.
#[test]
fn peers_connect_and_close_a_thousand_times() {
    let victim = Victim::new();
    victim.assert_works();
    let process = victim.bed.processes[0].id();
    let before = descriptors(process);
    for i in 0..1000 {
        let stream = TcpStream::connect(victim.address()).unwrap();
        let mut peer = Peer::of(stream);
        match i % 4 {
            0 => {}
            1 => peer.write(&Begins::PeerToPeer.request()),
            2 => peer.write(&Begins::Revision1.request()[..19]),
            _ => peer.reset(),
        }
    }
    // Requests of peers that have gone are not kept for the driver.
    let deadline = std::time::Instant::now() + TIMEOUT;
    while descriptors(process) > before {
        assert!(std::time::Instant::now() < deadline);
        std::thread::sleep(NOTHING / 10);
    }
    let told = std::iter::from_fn(|| next(victim.vm())).count();
    assert_eq!(told, 0);
    victim.leave();
}

/// A driver that accepts a connection learns what came of it, even if the peer goes meanwhile.
// D-IWP-007.
#[test]
fn a_peer_goes_while_it_is_accepted() {
    let victim = Victim::new();
    let mut side = victim.bed.side(1);
    for i in 0..300u32 {
        let mut peer = Peer::connect(victim.address());
        peer.write(&Begins::Revision1.request());
        let request = event(victim.vm(), iw_event::CONNECT_REQUEST);
        let gone = std::thread::spawn(move || {
            for _ in 0..i % 50 * 20 {
                std::hint::spin_loop();
            }
            peer.reset();
        });
        match accept(victim.vm(), request.connection, &side, DEPTH, b"") {
            Err(error) => assert_eq!(error.status(), Some(status::ENOENT)),
            Ok(()) => loop {
                let came = next(victim.vm());
                match came.map(|event| event.kind) {
                    Some(iw_event::CLOSE) => break,
                    Some(kind) => assert_eq!(kind, iw_event::ESTABLISHED),
                    None => {
                        let told = victim.vm().wait_async_event(TIMEOUT).unwrap();
                        told.expect("an event of a connection");
                    }
                }
            },
        }
        gone.join().unwrap();
        if side.qp.state().unwrap() != qp_state::INIT {
            side = victim.bed.side(1);
        }
    }
    drop(side);
    victim.leave();
}

/// Without a CRC, which both ends must want, whatever is in its place does no harm.
// D-IWP-003.
#[test]
fn a_crc_that_nobody_wants_is_not_looked_at() {
    let victim = Victim::on(Bed::with(false, "crc = false"));
    let side = victim.bed.side(1);
    let mut peer = Peer::connect(victim.address());
    peer.write(&request(1, 0, b""));
    let asks = event(victim.vm(), iw_event::CONNECT_REQUEST);
    accept(victim.vm(), asks.connection, &side, DEPTH, b"").unwrap();
    assert_eq!(peer.frame().expect("a reply").flags, 0);
    event(victim.vm(), iw_event::ESTABLISHED);
    side.qp.post_recv(5, &[side.mr.sge(0, 64)]).unwrap();
    let mut bytes = fpdu(&send(1, b"12345678"));
    let length = bytes.len();
    bytes[length - 4..].copy_from_slice(b"none");
    peer.write(&bytes);
    assert_success(&side.received());
    // Who wants it gets it.
    drop(peer);
    event(victim.vm(), iw_event::CLOSE);
    drop(side);
    victim.leave();
}

/// Events that a driver leaves lying are no way to make the device keep more and more.
// D-IWP-006.
#[test]
fn events_that_nobody_takes_are_in_the_account() {
    let bed = Bed::with(false, TO_THE_TEST);
    let socket = bed.directory.join("vm0");
    let side = bed.side(0);
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let to = endpoint(Ipv4Addr::LOCALHOST.into(), port);
    let mut asked = 0;
    let deadline = std::time::Instant::now() + TIMEOUT;
    while asked < 50 {
        assert!(std::time::Instant::now() < deadline);
        // Until the one before has failed, the queue pair has a connection.
        match try_connect(&bed.vms[0], &side, to, 1, b"") {
            Ok(_) => asked += 1,
            Err(error) => assert_eq!(error.status(), Some(status::EINVAL)),
        }
    }
    drop(side);
    let kept = || crate::common::footprint(&bed.processes[0], &socket);
    assert!(kept() >= 50 * 328, "{}", kept());
    let mut came = 0;
    while came < 50 {
        assert!(std::time::Instant::now() < deadline);
        came += usize::from(next(&bed.vms[0]).is_some());
    }
    assert_footprint_falls_to(&bed.processes[0], &socket, 0);
}

/// A connection that is not there cannot be accepted, whatever its number.
#[test]
fn numbers_of_connections_are_checked() {
    let victim = Victim::new();
    let (side, peer) = victim.accept(Begins::Revision1);
    let other = victim.bed.side(1);
    for connection in [0, 1, 2, 3, 99, u32::MAX] {
        let body = iwarp::IwAccept {
            connection,
            qpn: other.qp.number(),
            ..iwarp::IwAccept::default()
        };
        let refused = victim.vm().execute::<IwAccept>(&body).map(drop);
        assert_eq!(refused.unwrap_err().status(), Some(status::ENOENT));
    }
    assert_eq!(side.qp.state().unwrap(), qp_state::RTS);
    assert_eq!(
        listen(victim.vm(), PORT).unwrap_err().status(),
        Some(status::EADDRINUSE)
    );
    drop(peer);
    event(victim.vm(), iw_event::CLOSE);
    assert_eq!(
        victim.vm().execute::<IwNextEvent>(&[]).unwrap().kind,
        iw_event::NONE
    );
    drop((side, other));
    victim.leave();
}

/// Peers that came, and say nothing, are no reason for others to wait.
// D-IWP-006.
#[test]
fn silent_peers_keep_nobody_waiting() {
    let victim = Victim::new();
    let silent: Vec<_> = (0..600).map(|_| Peer::connect(victim.address())).collect();
    victim.assert_works();
    // Those that came first were sent away.
    let [mut first, .., mut last] = <[Peer; 600]>::try_from(silent).unwrap_or_else(|_| panic!());
    first.assert_closed();
    let side = victim.bed.side(1);
    last.write(&Begins::Revision1.request());
    let request = event(victim.vm(), iw_event::CONNECT_REQUEST);
    accept(victim.vm(), request.connection, &side, DEPTH, b"").unwrap();
    event(victim.vm(), iw_event::ESTABLISHED);
    drop(last);
    event(victim.vm(), iw_event::CLOSE);
    drop(side);
    victim.leave();
}

/// What a VM makes the process keep, bytes.
fn account(bed: &Bed, vm: usize) -> u64 {
    crate::common::footprint(&bed.processes[0], &bed.directory.join(format!("vm{vm}")))
}

/// What a peer asks for waits while the account of the VM has no room for it, and nobody else does.
// D-IWP-006.
#[test]
fn answers_wait_for_room_in_the_account() {
    let used = {
        let victim = Victim::new();
        let _accepted = victim.accept(Begins::Revision2);
        account(&victim.bed, 1)
    };
    for polled in [true, false] {
        let small = format!("footprint = {}", used + 300_000);
        let victim = Victim::on(Bed::configured(false, &small, ""));
        let (side, mut peer) = victim.accept(Begins::Revision2);
        // What these leave is not enough for what waits to be sent.
        let listeners = (1..=60).map(|at| listen(victim.vm(), PORT + at).unwrap());
        let listeners: Vec<_> = listeners.collect();
        let neighbour = victim.bed.side(0);
        let data = pattern(8, 1000);
        side.mr.write(0, &data);
        peer.put(&[read_request(1, side.mr.rkey, side.mr.iova, 1000)]);
        std::thread::sleep(NOTHING);
        if polled {
            side.qp
                .write(1, &[side.mr.sge(0, 8)], 0x1000, 0x77)
                .unwrap();
        }
        // The worker is there for others.
        neighbour.qp.set_state(qp_state::ERR).unwrap();
        neighbour
            .qp
            .post_recv(3, &[neighbour.mr.sge(0, 8)])
            .unwrap();
        assert_status(&neighbour.received(), FLUSHED);
        for listener in listeners {
            destroy_listen(victim.vm(), listener).unwrap();
        }
        let came = peer.ulpdu().expect("an answer");
        assert_eq!(came, tagged(READ_RESPONSE, true, 7, 0x1000, &data));
        if polled {
            assert_success(&side.sent());
        }
        drop(peer);
        event(victim.vm(), iw_event::CLOSE);
        drop((side, neighbour));
        victim.leave();
    }
}

/// Without room in the account of the VM, connections that begin fail as connections do.
// D-IWP-007.
#[test]
fn connections_fail_without_room_in_the_account() {
    let passive = Passive::new();
    let used = {
        let bed = Bed::with(false, TO_THE_TEST);
        let _others = (bed.side(0), bed.listen(0), passive.asked(&bed));
        account(&bed, 0)
    };
    let small = format!("footprint = {}", used + 100);
    let mut bed = Bed::configured(false, &small, TO_THE_TEST);
    let vm = &bed.vms[0];
    let (other, listener) = (bed.side(0), bed.listen(0));
    let (side, mut peer) = passive.asked(&bed);
    let to = endpoint(Ipv4Addr::LOCALHOST.into(), passive.port);
    let refused = try_connect(vm, &other, to, DEPTH, b"");
    assert_eq!(refused.unwrap_err().status(), Some(status::ENOMEM));
    assert_eq!(
        listen(vm, PORT + 1).unwrap_err().status(),
        Some(status::ENOMEM)
    );
    Peer::connect((bed.hosts[0], PORT).into()).assert_closed();
    // The begin of an FPDU behind the reply is to be kept.
    let part = fpdu(&send(1, &[1; 30_000]));
    let (part, _) = part.split_at(20_000);
    peer.write(&[reply(1, CRC, b""), part.to_vec()].concat());
    let came = event(vm, iw_event::CONNECT_REPLY);
    assert_eq!(came.status, status::ECONNRESET);
    assert_eq!(side.qp.state().unwrap(), qp_state::INIT);
    // There is room for another one now.
    let mut peer = Peer::connect((bed.hosts[0], PORT).into());
    peer.write(&Begins::Revision1.request());
    let request = event(vm, iw_event::CONNECT_REQUEST);
    accept(vm, request.connection, &other, DEPTH, b"").unwrap();
    event(vm, iw_event::ESTABLISHED);
    drop(peer);
    event(vm, iw_event::CLOSE);
    destroy_listen(vm, listener).unwrap();
    drop((side, other));
    bed.assert_unharmed();
    let socket = bed.directory.join("vm0");
    assert_footprint_falls_to(&bed.processes[0], &socket, 0);
}

/// A queue pair that closes waits for what it has asked for, and closes then.
// D-IWP-008.
#[test]
fn an_answer_comes_to_a_queue_pair_that_closes() {
    let victim = Victim::new();
    let (side, mut peer) = victim.accept(Begins::Revision2);
    side.qp.read(9, &[side.mr.sge(0, 8)], 0x8000, 5).unwrap();
    let asked = peer.ulpdu().expect("a request");
    side.qp.set_state(qp_state::SQD).unwrap();
    side.assert_quiet();
    let stag = u32::from_be_bytes(asked[18..22].try_into().unwrap());
    peer.put(&[tagged(
        READ_RESPONSE,
        true,
        stag,
        0,
        b"an answer"[..8].as_ref(),
    )]);
    assert_success(&side.sent());
    assert_eq!(peer.end(), None);
    assert_eq!(event(victim.vm(), iw_event::CLOSE).status, 0);
    drop(side);
    victim.leave();
}

/// Peers that say nothing, at however many listeners, leave room for others.
// D-IWP-006.
#[test]
fn silent_peers_of_many_listeners_keep_nobody_waiting() {
    let victim = Victim::new();
    let at = |n: u16| PORT + 1 + n;
    let listeners = (0..20).map(|n| listen(victim.vm(), at(n)).unwrap());
    let listeners: Vec<_> = listeners.collect();
    let address = |n: u16| SocketAddr::from((victim.bed.hosts[1], at(n % 20)));
    let silent: Vec<_> = (0..5200).map(|n| Peer::connect(address(n))).collect();
    std::thread::sleep(NOTHING);
    // The VM itself connects, and others do to it.
    let side = victim.bed.side(1);
    let to = endpoint(guest(0), PORT);
    try_connect(victim.vm(), &side, to, 1, b"").unwrap();
    let refused = event(victim.vm(), iw_event::CONNECT_REPLY).status;
    assert_eq!(refused, status::ECONNREFUSED);
    victim.assert_works();
    drop(silent);
    // Nor do those that ask for connections which the driver neither accepts nor rejects.
    let many: Vec<_> = (100..105u16).map(at).collect();
    let others = many.iter().map(|port| {
        let body = iwarp::IwListen {
            local: endpoint(Ipv4Addr::UNSPECIFIED.into(), *port),
            backlog: 2000,
            ..iwarp::IwListen::default()
        };
        victim.vm().execute::<IwListen>(&body).unwrap().handle
    });
    let others: Vec<_> = others.collect();
    let mut asking = Vec::new();
    for n in 0..4500 {
        let to = SocketAddr::from((victim.bed.hosts[1], many[n % many.len()]));
        let mut peer = Peer::connect(to);
        peer.write(&Begins::Revision1.request());
        asking.push(peer);
    }
    std::thread::sleep(NOTHING);
    try_connect(victim.vm(), &side, to, 1, b"").unwrap();
    drop(asking);
    for listener in others {
        destroy_listen(victim.vm(), listener).unwrap();
    }
    let deadline = std::time::Instant::now() + TIMEOUT;
    let replied = |came: &iwarp::IwEvent| came.kind == iw_event::CONNECT_REPLY;
    while !next(victim.vm()).as_ref().is_some_and(replied) {
        assert!(std::time::Instant::now() < deadline);
    }
    drop(side);
    for listener in listeners {
        destroy_listen(victim.vm(), listener).unwrap();
    }
    victim.leave();
}

/// A peer that takes long answers as fast as they come keeps nobody else waiting.
// D-IWP-006.
#[test]
fn long_answers_keep_nobody_waiting() {
    const LONG: u32 = 32 << 20;
    const READS: u16 = 16;
    let victim = Victim::new();
    let (other, mut peer) = victim.accept(Begins::Revision1);
    let options = SideOptions {
        memory: LONG as usize,
        ..SideOptions::default()
    };
    let side = victim.bed.side_with(1, &options);
    let mut reads = Peer::connect(victim.address());
    reads.write(&Begins::Revision1.request());
    let request = event(victim.vm(), iw_event::CONNECT_REQUEST);
    accept(victim.vm(), request.connection, &side, READS, b"").unwrap();
    reads.frame().expect("a reply");
    event(victim.vm(), iw_event::ESTABLISHED);
    let (at, key) = (side.mr.iova, side.mr.rkey);
    let requests: Vec<_> = (1..=READS.into())
        .map(|msn| read_request(msn, key, at, LONG))
        .collect();
    let taking = std::thread::spawn(move || {
        use std::io::Read;
        reads.put(&requests);
        let mut space = vec![0; 1 << 20];
        let mut left = u64::from(LONG) * u64::from(READS);
        while left != 0 {
            let came = reads.0.read(&mut space).unwrap() as u64;
            assert_ne!(came, 0);
            left = left.saturating_sub(came);
        }
        reads
    });
    let mut rounds = 0;
    while !taking.is_finished() {
        rounds += 1;
        other.qp.post_recv(1, &[other.mr.sge(0, 64)]).unwrap();
        peer.put(&[send(rounds, b"go on")]);
        assert_success(&other.received());
    }
    assert_ne!(rounds, 0);
    drop((taking.join().unwrap(), peer));
    for _ in 0..2 {
        event(victim.vm(), iw_event::CLOSE);
    }
    drop((side, other));
    victim.leave();
}
