// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Packets of the transport, as bytes and as values (InfiniBand architecture specification, volume
//! 1, chapter 9): base transport header, extension headers, payload, padding.
use arrayvec::ArrayVec;
use virtio_rdma_spec::facts::{Imm, Kind, OPCODES};
use virtio_rdma_spec::verbs::{qp_type, wc_status, wr_opcode, MASK_24};

use super::srd_packet::{SrdPacket, DATA, RESET};
use crate::verbs::WcError;

/// A packet sequence number: 24 bits, which wrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Psn(u32);

/// What comes after a packet is less than half of all numbers ahead of it.
pub(super) const HALF: u32 = 1 << 23;

impl Psn {
    pub(super) fn new(value: u32) -> Self {
        Self(value & MASK_24)
    }

    pub(super) fn value(self) -> u32 {
        self.0
    }

    /// The one that comes `packets` later.
    pub(super) fn after(self, packets: u32) -> Self {
        Self::new(self.0.wrapping_add(packets))
    }

    /// The one before.
    pub(super) fn before(self) -> Self {
        Self::new(self.0.wrapping_sub(1))
    }

    /// How many packets later than `earlier` it is, modulo 2^24.
    pub(super) fn since(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0) & MASK_24
    }
}

/// Which part of a message a packet has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    First,
    Middle,
    Last,
    Only,
}

impl Place {
    pub(super) fn of(first: bool, last: bool) -> Self {
        match (first, last) {
            (true, true) => Self::Only,
            (true, false) => Self::First,
            (false, true) => Self::Last,
            (false, false) => Self::Middle,
        }
    }

    /// Whether it begins a message.
    pub(super) fn begins(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Whether it ends a message.
    pub(super) fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
}

/// The transport service: between which queue pairs a packet is. The upper three bits of its opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Service {
    Rc,
    Uc,
    Ud,
    Xrc,
    /// That of congestion notifications (RoCEv2), to a queue pair of any.
    Notification,
    /// That of packets that a manufacturer has defined: to a queue pair of RC or XRC. Others drop them.
    Ours,
}

/// The lower bits of an opcode, which say what a packet is.
const OPCODE_BITS: u8 = 0x1f;
/// How many values they have.
const PACKET_OPCODES: usize = 1 << OPCODE_BITS.count_ones();

impl Service {
    /// Those of messages.
    const ALL: [Self; 4] = [Self::Rc, Self::Uc, Self::Ud, Self::Xrc];

    /// That of queue pairs of a type.
    pub(super) fn of(qp_type: u8) -> Option<Self> {
        match qp_type {
            qp_type::RC => Some(Self::Rc),
            qp_type::UC => Some(Self::Uc),
            qp_type::UD | qp_type::GSI => Some(Self::Ud),
            qp_type::XRC_INI | qp_type::XRC_TGT => Some(Self::Xrc),
            _ => None,
        }
    }

    fn bits(self) -> u8 {
        match self {
            Self::Rc => 0x00,
            Self::Uc => 0x20,
            Self::Ud => 0x60,
            Self::Notification => 0x80,
            Self::Xrc => 0xa0,
            Self::Ours => 0xc0,
        }
    }

    /// The type of the queue pairs that send its requests, if it has any.
    const fn requester(self) -> Option<u8> {
        match self {
            Self::Rc => Some(qp_type::RC),
            Self::Uc => Some(qp_type::UC),
            Self::Ud => Some(qp_type::UD),
            Self::Xrc => Some(qp_type::XRC_INI),
            Self::Notification | Self::Ours => None,
        }
    }

    /// Whether its requests are answered.
    pub(super) fn answers(self) -> bool {
        matches!(self, Self::Rc | Self::Xrc)
    }
}

/// What the packets of requests have in common that have the same opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    /// The lower bits of the opcode on the wire.
    opcode: u8,
    /// What its message does.
    pub kind: Kind,
    /// Its part of the message.
    pub place: Place,
    /// The opcode of the work request, as far as this packet tells: with immediate data or a key to
    /// invalidate, the last one tells.
    pub wr_opcode: u8,
    /// What its four bytes of immediate data are, if it has any.
    pub imm: Imm,
    /// The services that have it, a bit each.
    services: u8,
}

const fn request(opcode: u8, kind: Kind, place: Place, wr_opcode: u8, imm: Imm) -> Request {
    let mut services = 0;
    let mut i = 0;
    while i < Service::ALL.len() {
        let service = Service::ALL[i];
        // A datagram is one packet, and UC has no packet with a key to invalidate.
        let there = match service {
            Service::Rc | Service::Xrc => true,
            Service::Uc => !matches!(imm, Imm::RemoteKey),
            Service::Ud => matches!(place, Place::Only),
            Service::Notification | Service::Ours => false,
        };
        let mut j = 0;
        while there && j < OPCODES.len() {
            if let Some(requester) = service.requester() {
                if OPCODES[j].opcode == wr_opcode && OPCODES[j].is_for(requester) {
                    services |= 1 << service as u8;
                }
            }
            j += 1;
        }
        i += 1;
    }
    Request {
        opcode,
        kind,
        place,
        wr_opcode,
        imm,
        services,
    }
}

/// The requests that there are. Which of them a service has, the table of work requests says.
#[rustfmt::skip]
const REQUESTS: [Request; 19] = {
    use wr_opcode::{
        ATOMIC_CMP_AND_SWP, ATOMIC_FETCH_AND_ADD, ATOMIC_WRITE, FLUSH, RDMA_READ, RDMA_WRITE,
        RDMA_WRITE_WITH_IMM, SEND, SEND_WITH_IMM, SEND_WITH_INV,
    };
    [
        request(0x00, Kind::Send, Place::First, SEND, Imm::None),
        request(0x01, Kind::Send, Place::Middle, SEND, Imm::None),
        request(0x02, Kind::Send, Place::Last, SEND, Imm::None),
        request(0x03, Kind::Send, Place::Last, SEND_WITH_IMM, Imm::Data),
        request(0x04, Kind::Send, Place::Only, SEND, Imm::None),
        request(0x05, Kind::Send, Place::Only, SEND_WITH_IMM, Imm::Data),
        request(0x06, Kind::Write, Place::First, RDMA_WRITE, Imm::None),
        request(0x07, Kind::Write, Place::Middle, RDMA_WRITE, Imm::None),
        request(0x08, Kind::Write, Place::Last, RDMA_WRITE, Imm::None),
        request(0x09, Kind::Write, Place::Last, RDMA_WRITE_WITH_IMM, Imm::Data),
        request(0x0a, Kind::Write, Place::Only, RDMA_WRITE, Imm::None),
        request(0x0b, Kind::Write, Place::Only, RDMA_WRITE_WITH_IMM, Imm::Data),
        request(0x0c, Kind::Read, Place::Only, RDMA_READ, Imm::None),
        request(0x13, Kind::Atomic, Place::Only, ATOMIC_CMP_AND_SWP, Imm::None),
        request(0x14, Kind::Atomic, Place::Only, ATOMIC_FETCH_AND_ADD, Imm::None),
        request(0x16, Kind::Send, Place::Last, SEND_WITH_INV, Imm::RemoteKey),
        request(0x17, Kind::Send, Place::Only, SEND_WITH_INV, Imm::RemoteKey),
        request(0x1c, Kind::Flush, Place::Only, FLUSH, Imm::None),
        request(0x1d, Kind::AtomicWrite, Place::Only, ATOMIC_WRITE, Imm::None),
    ]
};

/// Answers.
const READ_RESPONSE_FIRST: u8 = 0x0d;
const READ_RESPONSE_MIDDLE: u8 = 0x0e;
const READ_RESPONSE_LAST: u8 = 0x0f;
const READ_RESPONSE_ONLY: u8 = 0x10;
const ACKNOWLEDGE: u8 = 0x11;
const ATOMIC_ACKNOWLEDGE: u8 = 0x12;
/// A congestion notification, with the bits of its service, and what it has behind its base
/// transport header: nothing (annex A17.9.3).
const NOTIFICATION: u8 = 0x81;
const RESERVED: [u8; 16] = [0; 16];
/// The packets of our own, and what they begin with behind their base transport header, so that they
/// are not taken for those of another manufacturer (specification: "Missing packets").
const QUERY: u8 = 0x00;
const REPORT: u8 = 0x01;
const OURS: [u8; 4] = *b"vrdm";
/// Bytes of one gap of a report, and how many it has at most.
const GAP: usize = 8;
pub(super) const MOST_GAPS: usize = 16;

/// The requests by the lower bits of their opcodes.
static BY_OPCODE: [Option<Request>; PACKET_OPCODES] = {
    let mut all = [None; PACKET_OPCODES];
    let mut i = 0;
    while i < REQUESTS.len() {
        all[REQUESTS[i].opcode as usize] = Some(REQUESTS[i]);
        i += 1;
    }
    all
};

/// Opcodes of work requests are below this.
const WR_OPCODES: usize = {
    let mut end = 0;
    let mut i = 0;
    while i < OPCODES.len() {
        if OPCODES[i].opcode as usize >= end {
            end = OPCODES[i].opcode as usize + 1;
        }
        i += 1;
    }
    end
};

/// The requests by the opcodes of work requests and the place of the packet in the message.
static BY_PLACE: [[Option<Request>; 4]; WR_OPCODES] = {
    let mut all = [[None; 4]; WR_OPCODES];
    let mut i = 0;
    while i < OPCODES.len() {
        let mut j = 0;
        while j < REQUESTS.len() {
            let (of, request) = (&OPCODES[i], REQUESTS[j]);
            let ends = matches!(request.place, Place::Last | Place::Only);
            let imm = if ends { of.imm } else { Imm::None };
            let same = of.kind as u8 == request.kind as u8 && imm as u8 == request.imm as u8;
            // There are two atomic operations. (Those with masks are not of this protocol.)
            let atomic = matches!(of.kind, Kind::Atomic);
            if same && (!atomic || of.opcode == request.wr_opcode) {
                all[of.opcode as usize][request.place as usize] = Some(request);
            }
            j += 1;
        }
        i += 1;
    }
    all
};

impl Request {
    /// That of a service with these lower bits of the opcode.
    fn of(service: Service, opcode: u8) -> Option<Self> {
        let request = *BY_OPCODE.get(usize::from(opcode))?;
        request.filter(|request| request.is_of(service))
    }

    /// That of the packet at `place` of a work request's message; `None` if such a message does not
    /// go over a fabric with packets.
    pub(super) fn at(service: Service, wr_opcode: u8, place: Place) -> Option<Self> {
        let places = BY_PLACE.get(usize::from(wr_opcode))?;
        let request = *places.get(place as usize)?;
        request.filter(|request| request.is_of(service))
    }

    /// Whether a service has it.
    fn is_of(self, service: Service) -> bool {
        self.services & 1 << service as u8 != 0
    }

    /// Whether it has the address and the key of a remote range.
    pub(super) fn has_range(self) -> bool {
        match self.kind {
            Kind::Write => self.place.begins(),
            Kind::Read | Kind::Atomic | Kind::AtomicWrite | Kind::Flush => true,
            _ => false,
        }
    }

    /// Whether it has the length of that range, in the RDMA extended transport header.
    fn has_length(self) -> bool {
        self.has_range() && self.kind != Kind::Atomic
    }

    /// Whether it has four bytes of immediate data, or a key to invalidate.
    fn has_immediate(self) -> bool {
        self.imm != Imm::None
    }
}

/// The remote range of an RDMA operation: the RDMA extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Reth {
    pub addr: u64,
    pub rkey: u32,
    pub length: u32,
}

/// What a request asks for beyond its remote range: its other extension header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Operands {
    #[default]
    None,
    /// Atomic: what to write or to add, and what to compare with.
    Atomic { swap_or_add: u64, compare: u64 },
    /// FLUSH: how visible (`flush_type`), and of which range (`flush_level`).
    Flush { kind: u8, level: u8 },
}

/// Where the level is in the FLUSH extended transport header, whose lowest bits are the type.
const FLUSH_LEVEL_SHIFT: u32 = 4;

/// What an acknowledgement says: the ACK extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Syndrome {
    /// All up to this packet came.
    Ack,
    /// There is no receive: try again after the time of this RNR NAK timer code.
    RnrNak(u8),
    /// Refused.
    Nak(Nak),
}

/// Why a packet was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Nak {
    /// Packets before it are missing.
    Sequence,
    /// The request is not one that the responder takes.
    InvalidRequest,
    /// The key or the queue pair does not grant the access.
    RemoteAccess,
    /// The responder cannot carry it out, for a reason of its own.
    RemoteOperational,
}

impl Nak {
    /// That of a message whose requester is to complete it with this error.
    pub(super) fn of(error: WcError) -> Self {
        match error.status {
            wc_status::REM_ACCESS_ERR => Self::RemoteAccess,
            wc_status::REM_INV_REQ_ERR => Self::InvalidRequest,
            _ => Self::RemoteOperational,
        }
    }
}

impl Syndrome {
    /// An ACK that grants no credits, since nobody counts them.
    const ACK: u8 = 0x1f;

    fn encode(self) -> u8 {
        match self {
            Self::Ack => Self::ACK,
            Self::RnrNak(timer) => 0x20 | timer & 0x1f,
            Self::Nak(Nak::Sequence) => 0x60,
            Self::Nak(Nak::InvalidRequest) => 0x61,
            Self::Nak(Nak::RemoteAccess) => 0x62,
            Self::Nak(Nak::RemoteOperational) => 0x63,
        }
    }

    fn decode(byte: u8) -> Option<Self> {
        match byte {
            0x00..=0x1f => Some(Self::Ack),
            0x20..=0x3f => Some(Self::RnrNak(byte & 0x1f)),
            0x60 => Some(Self::Nak(Nak::Sequence)),
            0x61 => Some(Self::Nak(Nak::InvalidRequest)),
            0x62 => Some(Self::Nak(Nak::RemoteAccess)),
            0x63 => Some(Self::Nak(Nak::RemoteOperational)),
            _ => None,
        }
    }
}

/// Whose a datagram is: the datagram extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Deth {
    pub qkey: u32,
    pub src_qp: u32,
}

/// A packet of a request. What its `request` or service does not have is zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RequestPacket<'a> {
    pub request: Request,
    /// UD.
    pub deth: Deth,
    /// XRC: the shared receive queue that it goes to, the XRC extended transport header.
    pub srqn: u32,
    /// The remote range. That of an atomic operation has no length.
    pub reth: Reth,
    pub operands: Operands,
    /// Immediate data or the key to invalidate. As in work requests: octets of the application, or
    /// a number.
    pub immediate: u32,
    pub payload: &'a [u8],
}

impl<'a> RequestPacket<'a> {
    /// With a payload, and nothing else.
    pub(super) fn new(request: Request, payload: &'a [u8]) -> Self {
        Self {
            request,
            deth: Deth::default(),
            srqn: 0,
            reth: Reth::default(),
            operands: Operands::None,
            immediate: 0,
            payload,
        }
    }

    /// Bytes of its extension headers.
    fn headers_len(&self, service: Service) -> usize {
        let of_service = match service {
            Service::Ud => DETH,
            Service::Xrc => XRCETH,
            Service::Rc | Service::Uc | Service::Notification | Service::Ours => 0,
        };
        let operands = match self.operands {
            Operands::None => 0,
            Operands::Flush { .. } => FETH,
            Operands::Atomic { .. } => OPERANDS,
        };
        let request = self.request;
        let word = size_of::<u32>();
        let range = usize::from(request.has_range()) * RANGE;
        let length = usize::from(request.has_length()) * word;
        let immediate = usize::from(request.has_immediate()) * word;
        of_service + operands + range + length + immediate
    }

    /// Appends its extension headers.
    fn write_headers(&self, service: Service, out: &mut Headers<'_>) {
        let Self { reth, request, .. } = self;
        match service {
            Service::Ud => {
                out.put(&self.deth.qkey.to_be_bytes());
                out.put(&(self.deth.src_qp & MASK_24).to_be_bytes());
            }
            Service::Xrc => out.put(&(self.srqn & MASK_24).to_be_bytes()),
            Service::Rc | Service::Uc | Service::Notification | Service::Ours => {}
        }
        if let Operands::Flush { kind, level } = self.operands {
            let feth = u32::from(level) << FLUSH_LEVEL_SHIFT | u32::from(kind);
            out.put(&feth.to_be_bytes());
        }
        if request.has_range() {
            out.put(&reth.addr.to_be_bytes());
            out.put(&reth.rkey.to_be_bytes());
        }
        if request.has_length() {
            out.put(&reth.length.to_be_bytes());
        }
        if let Operands::Atomic {
            swap_or_add,
            compare,
        } = self.operands
        {
            out.put(&swap_or_add.to_be_bytes());
            out.put(&compare.to_be_bytes());
        }
        if request.has_immediate() {
            out.put(&if request.imm == Imm::RemoteKey {
                self.immediate.to_be_bytes()
            } else {
                self.immediate.to_le_bytes()
            });
        }
    }

    /// Reads what follows the base transport header.
    fn read(
        service: Service,
        request: Request,
        mut bytes: &'a [u8],
        padding: usize,
    ) -> Option<Self> {
        let mut packet = Self::new(request, &[]);
        match service {
            Service::Ud => {
                packet.deth.qkey = take_u32(&mut bytes)?;
                packet.deth.src_qp = take_u32(&mut bytes)? & MASK_24;
            }
            Service::Xrc => packet.srqn = take_u32(&mut bytes)? & MASK_24,
            Service::Rc | Service::Uc | Service::Notification | Service::Ours => {}
        }
        if request.kind == Kind::Flush {
            let feth = take_u32(&mut bytes)?;
            packet.operands = Operands::Flush {
                kind: (feth & ((1 << FLUSH_LEVEL_SHIFT) - 1)) as u8,
                level: (feth >> FLUSH_LEVEL_SHIFT & 3) as u8,
            };
        }
        if request.has_range() {
            packet.reth.addr = take(&mut bytes).map(u64::from_be_bytes)?;
            packet.reth.rkey = take_u32(&mut bytes)?;
        }
        if request.has_length() {
            packet.reth.length = take_u32(&mut bytes)?;
        }
        if request.kind == Kind::Atomic {
            packet.operands = Operands::Atomic {
                swap_or_add: take(&mut bytes).map(u64::from_be_bytes)?,
                compare: take(&mut bytes).map(u64::from_be_bytes)?,
            };
        }
        if request.has_immediate() {
            let octets = take(&mut bytes)?;
            packet.immediate = if request.imm == Imm::RemoteKey {
                u32::from_be_bytes(octets)
            } else {
                u32::from_le_bytes(octets)
            };
        }
        packet.payload = unpadded(bytes, padding)?;
        Some(packet)
    }
}

/// What a packet is, with its extension headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body<'a> {
    /// A part of a message.
    Request(RequestPacket<'a>),
    /// An answer.
    Acknowledge {
        syndrome: Syndrome,
        /// Messages completed by the responder, 24 bits.
        msn: u32,
    },
    /// A part of what an RDMA READ brings. To FLUSH and ATOMIC WRITE, `Only` and empty.
    ReadResponse {
        place: Place,
        /// Not of those in the middle, where it is zero.
        msn: u32,
        payload: &'a [u8],
    },
    /// What was there before an atomic operation.
    AtomicAcknowledge { msn: u32, value: u64 },
    /// The network is congested on the way from the queue pair that it goes to.
    Notification,
    /// A requester asks what is missing of all before this packet. It numbers its queries.
    Query { number: u32 },
    /// The answer to that query: this packet is expected next, and this is missing from there on.
    Report { number: u32, gaps: Gaps<'a> },
    /// Of reliable datagrams.
    Srd(SrdPacket<'a>),
}

/// Packets that are missing: bytes of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gaps<'a>(&'a [u8]);

impl Gaps<'_> {
    /// The first packet of each gap, and how many there are.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Psn, u32)> + '_ {
        self.0.chunks_exact(GAP).filter_map(|mut bytes| {
            let first = take_u32(&mut bytes)?;
            Some((Psn::new(first), take_u32(&mut bytes)?))
        })
    }
}

/// The gaps of a report, as they are written.
#[derive(Debug, Default)]
pub(super) struct GapList(ArrayVec<u8, { GAP * MOST_GAPS }>);

impl GapList {
    /// Appends a gap of so many packets, if there is room.
    pub(super) fn push(&mut self, first: Psn, packets: u32) {
        let [a, b] = [first.value(), packets].map(u32::to_be_bytes);
        if self.0.remaining_capacity() >= GAP {
            self.0.extend(a.into_iter().chain(b));
        }
    }

    pub(super) fn gaps(&self) -> Gaps<'_> {
        Gaps(&self.0)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Packet<'a> {
    pub service: Service,
    pub dest_qp: u32,
    pub psn: Psn,
    /// The requester asks for an acknowledgement.
    pub ack_request: bool,
    pub solicited: bool,
    pub body: Body<'a>,
}

/// The only partition.
const PKEY: u16 = 0xffff;
/// Bytes of a base transport header, and of extension headers: datagram, XRC, FLUSH, RDMA without its
/// length, atomic without the range, ACK.
const BTH: usize = 12;
const DETH: usize = 8;
const XRCETH: usize = 4;
const FETH: usize = 4;
const RANGE: usize = 12;
const OPERANDS: usize = 16;
const AETH: usize = 4;
/// Migration state: migrated, as adapters send it.
const MIGRATED: u8 = 0x40;
/// Backward explicit congestion notification, beside the number of the queue pair.
const BECN: u32 = 1 << 30;

/// Headers, as they are written to the beginning of a space.
#[derive(Debug)]
pub(super) struct Headers<'a> {
    space: &'a mut [u8],
    len: usize,
}

impl<'a> Headers<'a> {
    pub(super) fn new(space: &'a mut [u8]) -> Self {
        Self { space, len: 0 }
    }

    /// Appends bytes, for which there is room.
    pub(super) fn put<const N: usize>(&mut self, bytes: &[u8; N]) {
        let rest = self.space.get_mut(self.len..);
        let place = rest.and_then(|rest| rest.first_chunk_mut());
        debug_assert!(place.is_some(), "the space is as long as its headers");
        if let Some(place) = place {
            *place = *bytes;
        }
        self.len += N;
    }

    /// Bytes that were written.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// What was written, and the rest.
    pub(super) fn split(self) -> Option<(&'a mut [u8], &'a mut [u8])> {
        self.space.split_at_mut_checked(self.len)
    }
}

/// Bytes of padding behind a payload of so many bytes.
pub(super) fn padding(payload: usize) -> usize {
    payload.wrapping_neg() & 3
}

/// The payload of a packet that is to be sent: what reads so many bytes of it. It says whether that
/// went well.
pub(super) struct Payload<'a> {
    pub len: usize,
    pub read: &'a mut dyn FnMut(&mut [u8]) -> bool,
}

/// Takes `N` bytes from the front.
pub(super) fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (head, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*head)
}

pub(super) fn take_u32(bytes: &mut &[u8]) -> Option<u32> {
    take(bytes).map(u32::from_be_bytes)
}

/// The bytes before the padding.
fn unpadded(bytes: &[u8], padding: usize) -> Option<&[u8]> {
    bytes.get(..bytes.len().checked_sub(padding)?)
}

fn write_aeth(out: &mut Headers<'_>, syndrome: Syndrome, msn: u32) {
    let aeth = u32::from(syndrome.encode()) << 24 | msn & MASK_24;
    out.put(&aeth.to_be_bytes());
}

/// What an ACK extended transport header says, with the MSN.
fn take_aeth(bytes: &mut &[u8]) -> Option<(Syndrome, u32)> {
    let aeth = take_u32(bytes)?;
    Some((Syndrome::decode((aeth >> 24) as u8)?, aeth & MASK_24))
}

/// The MSN of an answer that is no refusal.
fn take_msn(bytes: &mut &[u8]) -> Option<u32> {
    let (syndrome, msn) = take_aeth(bytes)?;
    (syndrome == Syndrome::Ack).then_some(msn)
}

fn read_response(place: Place) -> u8 {
    match place {
        Place::First => READ_RESPONSE_FIRST,
        Place::Middle => READ_RESPONSE_MIDDLE,
        Place::Last => READ_RESPONSE_LAST,
        Place::Only => READ_RESPONSE_ONLY,
    }
}

/// Reads an answer; `None` if the opcode is none of one, and `Some(None)` if it is damaged.
fn read_answer<'a>(opcode: u8, bytes: &mut &'a [u8], padding: usize) -> Option<Option<Body<'a>>> {
    let place = match opcode {
        READ_RESPONSE_FIRST => Place::First,
        READ_RESPONSE_MIDDLE => Place::Middle,
        READ_RESPONSE_LAST => Place::Last,
        READ_RESPONSE_ONLY => Place::Only,
        ACKNOWLEDGE => {
            let body = take_aeth(bytes).filter(|_| bytes.is_empty());
            return Some(body.map(|(syndrome, msn)| Body::Acknowledge { syndrome, msn }));
        }
        ATOMIC_ACKNOWLEDGE => {
            let msn = take_msn(bytes);
            let value = take(bytes).map(u64::from_be_bytes);
            let body = msn.zip(value).filter(|_| bytes.is_empty());
            return Some(body.map(|(msn, value)| Body::AtomicAcknowledge { msn, value }));
        }
        _ => return None,
    };
    let msn = if place == Place::Middle {
        Some(0)
    } else {
        take_msn(bytes)
    };
    let body = msn.zip(unpadded(bytes, padding));
    Some(body.map(|(msn, payload)| Body::ReadResponse {
        place,
        msn,
        payload,
    }))
}

/// Whether an opcode is one of reliable datagrams.
pub(super) fn is_srd(opcode: u8) -> bool {
    let ours = opcode & !OPCODE_BITS == Service::Ours.bits();
    ours && matches!(opcode & OPCODE_BITS, DATA..=RESET)
}

/// Reads what is in a packet of our own.
fn read_ours(opcode: u8, mut bytes: &[u8], padding: usize) -> Option<Body<'_>> {
    if matches!(opcode, DATA..=RESET) {
        return SrdPacket::read(opcode, bytes, padding).map(Body::Srd);
    }
    if padding != 0 {
        return None;
    }
    let ours = take(&mut bytes)? == OURS;
    let number = take_u32(&mut bytes).filter(|_| ours)?;
    match opcode {
        QUERY if bytes.is_empty() => Some(Body::Query { number }),
        REPORT if bytes.len() % GAP == 0 && bytes.len() <= GAP * MOST_GAPS => {
            let gaps = Gaps(bytes);
            Some(Body::Report { number, gaps })
        }
        _ => None,
    }
}

/// Whether a P_Key is that of our partition. The highest bit says whether its holder is a full member.
fn is_ours(pkey: [u8; 2]) -> bool {
    u16::from_be_bytes(pkey) & 0x7fff == PKEY & 0x7fff
}

/// Whether what a packet is read from has the P_Key of another partition.
pub(super) fn has_wrong_pkey(bytes: &[u8]) -> bool {
    let pkey = bytes.get(2..).and_then(<[u8]>::first_chunk);
    pkey.is_some_and(|pkey| !is_ours(*pkey))
}

impl<'a> Packet<'a> {
    /// A congestion notification to a queue pair.
    pub(super) fn notification(dest_qp: u32) -> Self {
        Self {
            service: Service::Notification,
            dest_qp,
            psn: Psn::default(),
            ack_request: false,
            solicited: false,
            body: Body::Notification,
        }
    }

    /// A packet of our own to a queue pair.
    pub(super) fn ours(dest_qp: u32, psn: Psn, body: Body<'a>) -> Self {
        Self {
            service: Service::Ours,
            dest_qp,
            psn,
            ack_request: false,
            solicited: false,
            body,
        }
    }

    /// A packet of reliable datagrams.
    pub(super) fn srd(dest_qp: u32, psn: Psn, packet: SrdPacket<'a>) -> Self {
        Self::ours(dest_qp, psn, Body::Srd(packet))
    }

    /// Whether it has data of a connection, or flow, whose sender heeds the state of the network: a router that
    /// is congested may say so in it.
    pub(super) fn may_be_marked(&self) -> bool {
        let data = matches!(self.body, Body::Request(_) | Body::ReadResponse { .. });
        let reliable = matches!(self.body, Body::Srd(SrdPacket::Data(..)));
        reliable || (data && self.service.answers())
    }

    /// Bytes of its headers, from the base transport header on.
    pub(super) fn headers_len(&self) -> usize {
        BTH + match &self.body {
            Body::Request(request) => request.headers_len(self.service),
            Body::Acknowledge { .. } => AETH,
            Body::AtomicAcknowledge { .. } => AETH + size_of::<u64>(),
            Body::ReadResponse { place, .. } if *place == Place::Middle => 0,
            Body::ReadResponse { .. } => AETH,
            Body::Notification => RESERVED.len(),
            Body::Query { .. } | Body::Report { .. } => OURS.len() + size_of::<u32>(),
            Body::Srd(packet) => packet.headers_len(),
        }
    }

    /// Appends its headers, from the base transport header on. A payload of so many bytes and its
    /// padding follow.
    pub(super) fn write_headers(&self, payload: usize, out: &mut Headers<'_>) {
        let opcode = match self.body {
            Body::Request(RequestPacket { request, .. }) => request.opcode,
            Body::Acknowledge { .. } => ACKNOWLEDGE,
            Body::AtomicAcknowledge { .. } => ATOMIC_ACKNOWLEDGE,
            Body::ReadResponse { place, .. } => read_response(place),
            Body::Notification => NOTIFICATION & OPCODE_BITS,
            Body::Query { .. } => QUERY,
            Body::Report { .. } => REPORT,
            Body::Srd(packet) => packet.opcode(),
        };
        let becn = if self.body == Body::Notification {
            BECN
        } else {
            0
        };
        let solicited = if self.solicited { 0x80 } else { 0 };
        let padding = (padding(payload) as u8) << 4;
        let [p0, p1] = PKEY.to_be_bytes();
        let [q0, q1, q2, q3] = (becn | self.dest_qp & MASK_24).to_be_bytes();
        let ack_request = u32::from(self.ack_request) << 31;
        let [s0, s1, s2, s3] = (ack_request | self.psn.value()).to_be_bytes();
        let opcode = self.service.bits() | opcode;
        let flags = solicited | MIGRATED | padding;
        let header: [u8; BTH] = [opcode, flags, p0, p1, q0, q1, q2, q3, s0, s1, s2, s3];
        out.put(&header);
        match self.body {
            Body::Request(request) => request.write_headers(self.service, out),
            Body::Acknowledge { syndrome, msn } => write_aeth(out, syndrome, msn),
            Body::AtomicAcknowledge { msn, value } => {
                write_aeth(out, Syndrome::Ack, msn);
                out.put(&value.to_be_bytes());
            }
            Body::ReadResponse {
                place: Place::Middle,
                ..
            } => {}
            Body::ReadResponse { msn, .. } => write_aeth(out, Syndrome::Ack, msn),
            Body::Notification => out.put(&RESERVED),
            // The gaps are the payload.
            Body::Query { number } | Body::Report { number, .. } => {
                out.put(&OURS);
                out.put(&number.to_be_bytes());
            }
            Body::Srd(packet) => packet.write_headers(out),
        }
    }

    /// Appends its bytes, from the base transport header to the end of the padding.
    #[cfg(test)]
    fn write(&self, out: &mut Vec<u8>) {
        let payload = self.payload();
        let begin = out.len();
        out.resize(begin + self.headers_len(), 0);
        let mut headers = Headers::new(&mut out[begin..]);
        self.write_headers(payload.len(), &mut headers);
        assert!(headers.split().unwrap().1.is_empty());
        out.extend_from_slice(payload);
        out.resize(out.len() + padding(payload.len()), 0);
    }

    /// What was read as its payload.
    #[cfg(test)]
    pub(super) fn payload(&self) -> &'a [u8] {
        match self.body {
            Body::Request(RequestPacket { payload, .. }) | Body::ReadResponse { payload, .. } => {
                payload
            }
            Body::Report { gaps, .. } => gaps.0,
            Body::Srd(SrdPacket::Data(_, payload)) => payload,
            _ => &[],
        }
    }

    /// Reads a packet from the base transport header to the end of the padding. `None` if it is
    /// none, or none that we know.
    pub(super) fn read(mut bytes: &'a [u8]) -> Option<Self> {
        let [opcode, flags, p0, p1, q0, q1, q2, q3, s0, s1, s2, s3] = take::<BTH>(&mut bytes)?;
        let dest_qp = u32::from_be_bytes([q0, q1, q2, q3]) & MASK_24;
        let sequence = u32::from_be_bytes([s0, s1, s2, s3]);
        let version = flags & 0x0f;
        if version != 0 || !is_ours([p0, p1]) {
            return None;
        }
        let padding = usize::from(flags >> 4 & 3);
        if opcode == NOTIFICATION {
            let whole = bytes.len() == RESERVED.len();
            return whole.then_some(Self::notification(dest_qp));
        }
        if opcode & !OPCODE_BITS == Service::Ours.bits() {
            let body = read_ours(opcode & OPCODE_BITS, bytes, padding)?;
            return Some(Self::ours(dest_qp, Psn::new(sequence), body));
        }
        let mut services = Service::ALL.into_iter();
        let service = services.find(|service| service.bits() == opcode & !OPCODE_BITS)?;
        let opcode = opcode & OPCODE_BITS;
        let answer = service
            .answers()
            .then(|| read_answer(opcode, &mut bytes, padding));
        let body = if let Some(body) = answer.flatten() {
            body?
        } else {
            let request = Request::of(service, opcode)?;
            Body::Request(RequestPacket::read(service, request, bytes, padding)?)
        };
        Some(Self {
            service,
            dest_qp,
            psn: Psn::new(sequence),
            ack_request: sequence >> 31 != 0,
            solicited: flags & 0x80 != 0,
            body,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn services() -> impl Strategy<Value = Service> {
        proptest::sample::select(Service::ALL.to_vec())
    }

    fn bodies() -> impl Strategy<Value = (usize, Reth, u32, Vec<u8>)> {
        let reth = (any::<u64>(), any::<u32>(), any::<u32>())
            .prop_map(|(addr, rkey, length)| Reth { addr, rkey, length });
        let payload = proptest::collection::vec(any::<u8>(), 0..200);
        (0..REQUESTS.len(), reth, any::<u32>(), payload)
    }

    proptest! {
        #[test]
        fn requests_are_read_as_they_were_written(
            service in services(),
            (which, reth, immediate, payload) in bodies(),
            (dest_qp, psn) in (0..=MASK_24, 0..=MASK_24),
            (ack_request, solicited) in any::<(bool, bool)>(),
        ) {
            let request = REQUESTS[which];
            let packet = Packet {
                service,
                dest_qp,
                psn: Psn::new(psn),
                ack_request,
                solicited,
                body: Body::Request(RequestPacket {
                    deth: match service {
                        Service::Ud => Deth { qkey: reth.rkey, src_qp: psn },
                        _ => Deth::default(),
                    },
                    srqn: if service == Service::Xrc { dest_qp } else { 0 },
                    reth: match request.kind {
                        Kind::Atomic => Reth { length: 0, ..reth },
                        _ if request.has_range() => reth,
                        _ => Reth::default(),
                    },
                    operands: match request.kind {
                        Kind::Atomic => Operands::Atomic {
                            swap_or_add: !reth.addr,
                            compare: reth.addr.rotate_left(9),
                        },
                        Kind::Flush => Operands::Flush {
                            kind: (psn & 0xf) as u8,
                            level: (psn >> 4 & 3) as u8,
                        },
                        _ => Operands::None,
                    },
                    immediate: if request.has_immediate() { immediate } else { 0 },
                    ..RequestPacket::new(request, &payload)
                }),
            };
            let mut bytes = Vec::new();
            packet.write(&mut bytes);
            prop_assert_eq!(bytes.len() % 4, 0);
            let there = request.is_of(service).then_some(packet);
            prop_assert_eq!(Packet::read(&bytes), there);
        }

        #[test]
        fn anything_may_come(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            if let Some(packet) = Packet::read(&bytes) {
                let mut again = Vec::new();
                packet.write(&mut again);
                prop_assert_eq!(Packet::read(&again), Some(packet));
            }
        }
    }

    #[test]
    fn acknowledgements_are_read_as_they_were_written() {
        let naks = [
            Nak::Sequence,
            Nak::InvalidRequest,
            Nak::RemoteAccess,
            Nak::RemoteOperational,
        ];
        let syndromes = naks.map(Syndrome::Nak).into_iter();
        let rnr = (0..32).map(Syndrome::RnrNak);
        for syndrome in syndromes.chain(rnr).chain([Syndrome::Ack]) {
            let packet = Packet {
                service: Service::Rc,
                dest_qp: 0x12_3456,
                psn: Psn::new(0xab_cdef),
                ack_request: false,
                solicited: false,
                body: Body::Acknowledge { syndrome, msn: 77 },
            };
            let mut bytes = Vec::new();
            packet.write(&mut bytes);
            assert_eq!((bytes.len(), bytes[0]), (16, 0x11));
            assert_eq!(Packet::read(&bytes), Some(packet));
        }
    }

    proptest! {
        #[test]
        fn what_is_brought_is_read_as_it_was_written(
            service in services(),
            (psn, msn, value) in (0..=MASK_24, 0..=MASK_24, any::<u64>()),
            payload in proptest::collection::vec(any::<u8>(), 0..200),
            place in prop_oneof![
                Just(Place::First),
                Just(Place::Middle),
                Just(Place::Last),
                Just(Place::Only),
            ],
        ) {
            let msn_there = if place == Place::Middle { 0 } else { msn };
            let payload = &payload[..];
            let bodies = [
                Body::ReadResponse { place, msn: msn_there, payload },
                Body::AtomicAcknowledge { msn, value },
            ];
            for body in bodies {
                let packet = Packet {
                    service,
                    dest_qp: 7,
                    psn: Psn::new(psn),
                    ack_request: false,
                    solicited: false,
                    body,
                };
                let mut bytes = Vec::new();
                packet.write(&mut bytes);
                let there = service.answers().then_some(packet);
                prop_assert_eq!(Packet::read(&bytes), there);
            }
        }
    }

    proptest! {
        #[test]
        fn packets_of_our_own_are_read_as_they_were_written(
            (psn, number) in (0..=MASK_24, any::<u32>()),
            gaps in proptest::collection::vec((0..=MASK_24, any::<u32>()), 0..2 * MOST_GAPS),
        ) {
            let mut list = GapList::default();
            for (first, packets) in &gaps {
                list.push(Psn::new(*first), *packets);
            }
            let first = gaps.iter().take(MOST_GAPS);
            let first: Vec<_> = first.map(|(first, packets)| (Psn::new(*first), *packets)).collect();
            prop_assert_eq!(list.gaps().iter().collect::<Vec<_>>(), first);
            let report = Body::Report { number, gaps: list.gaps() };
            for body in [Body::Query { number }, report] {
                let packet = Packet::ours(7, Psn::new(psn), body);
                let mut bytes = Vec::new();
                packet.write(&mut bytes);
                prop_assert_eq!(Packet::read(&bytes), Some(packet));
                // Those of others.
                bytes[12] ^= 1;
                prop_assert_eq!(Packet::read(&bytes), None);
            }
        }
    }

    #[test]
    fn each_work_request_has_a_packet_for_each_place() {
        for opcode in [
            wr_opcode::SEND,
            wr_opcode::SEND_WITH_IMM,
            wr_opcode::SEND_WITH_INV,
            wr_opcode::RDMA_WRITE,
            wr_opcode::RDMA_WRITE_WITH_IMM,
        ] {
            for place in [Place::First, Place::Middle, Place::Last, Place::Only] {
                let request = Request::at(Service::Rc, opcode, place).unwrap();
                assert_eq!(request.place, place);
                assert!(!place.ends() || request.wr_opcode == opcode);
                assert_eq!(Request::at(Service::Xrc, opcode, place), Some(request));
                // UC has no keys of others to invalidate, UD one packet and no remote memory.
                let of_uc = opcode != wr_opcode::SEND_WITH_INV || !place.ends();
                let at = |service| Request::at(service, opcode, place);
                assert_eq!(at(Service::Uc).is_some(), of_uc);
                let sends = matches!(opcode, wr_opcode::SEND | wr_opcode::SEND_WITH_IMM);
                assert_eq!(at(Service::Ud).is_some(), sends && place == Place::Only);
            }
        }
        for opcode in [
            wr_opcode::RDMA_READ,
            wr_opcode::ATOMIC_CMP_AND_SWP,
            wr_opcode::ATOMIC_FETCH_AND_ADD,
            wr_opcode::ATOMIC_WRITE,
            wr_opcode::FLUSH,
        ] {
            let request = Request::at(Service::Rc, opcode, Place::Only).unwrap();
            assert_eq!(request.wr_opcode, opcode);
            assert_eq!(Request::at(Service::Rc, opcode, Place::First), None);
            assert_eq!(Request::at(Service::Uc, opcode, Place::Only), None);
        }
        let masked = wr_opcode::MASKED_ATOMIC_FETCH_AND_ADD;
        assert_eq!(Request::at(Service::Rc, masked, Place::Only), None);
    }

    #[test]
    fn sequence_numbers_wrap() {
        let last = Psn::new(MASK_24);
        assert_eq!(last.after(1), Psn::new(0));
        assert_eq!(Psn::new(0).before(), last);
        assert_eq!(Psn::new(3).since(last), 4);
        assert_eq!(last.since(last), 0);
    }
}
