// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The port of a VM whose network interface the host has as an interface of its own, such as the TAP
//! of QEMU: RDMA packets go in and out there, beside all others of the VM.
//!
//! A TAP of ours is joined to that interface by two programs in the kernel. What leaves the host by
//! the interface, towards the VM, and is RoCEv2, goes to our TAP instead. What we write to our TAP
//! comes to the host as if the VM had sent it: bridges, filters and routes see it where they see the
//! VM. When this process ends, all goes to the VM again.
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use nix::net::if_::if_nametoindex;

use super::super::frame::{self, checksum, folded};
use super::kernel::{attach, bring_up, keep, keep_no_longer, load, mtu, pin, tap, Instruction};
use super::{Arrived, Burst, LONGEST};
use crate::engine::vm::Segment;

/// Bytes of the header that is before each frame (`virtio_net_hdr`). Zeros: nothing is left to do.
const HEADER: usize = 10;

/// Why there is no port at an interface.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The interface is not there.
    #[error("there is no interface {0}")]
    NoInterface(String),
    /// The system refuses a step.
    #[error("cannot {0}")]
    System(&'static str, #[source] io::Error),
}

/// A TAP that is joined to an interface.
#[derive(Debug)]
pub struct Tap {
    file: File,
    /// They last as long as these are open; none of a TAP that was prepared.
    _programs: Option<[OwnedFd; 2]>,
}

/// What is pinned for an interface: the program that sends frames to the device, and the other one.
const PINS: [&str; 2] = ["to-device", "from-device"];

/// What the TAP is called that is prepared for an interface.
fn prepared_name(interface: u32) -> String {
    format!("rdma-{interface}")
}

fn pin_path(pins: &Path, interface: u32, which: &str) -> PathBuf {
    pins.join(format!("{}-{which}", prepared_name(interface)))
}

fn refused(what: &'static str) -> impl Fn(io::Error) -> TapError {
    move |error| TapError::System(what, error)
}

fn index_of(interface: &str) -> Result<u32, TapError> {
    if_nametoindex(interface).map_err(|_| TapError::NoInterface(interface.to_owned()))
}

/// The longest IP packet of an interface, bytes, if there is one.
pub(crate) fn mtu_of(interface: &str) -> Option<usize> {
    mtu(interface).ok()
}

impl Tap {
    /// Opens the TAP that was prepared for `interface`; where there is none, makes one, and joins it.
    ///
    /// # Errors
    /// If there is no such interface, or the system refuses: to make and to join one takes
    /// CAP_NET_ADMIN and CAP_BPF, and Linux 6.6.
    pub fn join(interface: &str) -> Result<Self, TapError> {
        let prepared = prepared_name(index_of(interface)?);
        if if_nametoindex(prepared.as_str()).is_ok() {
            let opened = tap(&prepared);
            let (file, _) =
                opened.map_err(refused("open the TAP that wire-setup made for its user"))?;
            return Ok(Self {
                file,
                _programs: None,
            });
        }
        let (file, programs) = Self::make("vrdma%d", interface)?;
        Ok(Self {
            file,
            _programs: Some(programs),
        })
    }

    /// Makes a TAP for `interface` that stays, for user `owner` to open; returns its name. The programs
    /// that join them are pinned in the directory `pins`.
    ///
    /// # Errors
    /// As [`Self::join`], and if there is one already, which is in use.
    pub fn prepare(interface: &str, owner: u32, pins: &Path) -> Result<String, TapError> {
        let index = index_of(interface)?;
        let name = prepared_name(index);
        Self::take_back(interface, pins)?;
        let (file, programs) = Self::make(&name, interface)?;
        for (program, which) in programs.iter().zip(PINS) {
            let path = pin_path(pins, index, which);
            let path = CString::new(path.into_os_string().into_vec());
            let path = path.map_err(|error| refused("pin the programs")(error.into()))?;
            pin(program, &path).map_err(refused(
                "pin the programs (is a file system of type bpf mounted there?)",
            ))?;
        }
        keep(&file, owner).map_err(refused("keep the TAP"))?;
        Ok(name)
    }

    /// Ends what [`Self::prepare`] did, as far as there is anything.
    ///
    /// # Errors
    /// If there is no such interface, or the TAP is in use.
    pub fn take_back(interface: &str, pins: &Path) -> Result<(), TapError> {
        let index = index_of(interface)?;
        let name = prepared_name(index);
        if if_nametoindex(name.as_str()).is_ok() {
            let opened = tap(&name).map_err(refused("open the TAP (is it in use?)"));
            opened
                .and_then(|(file, _)| keep_no_longer(&file).map_err(refused("give up the TAP")))?;
        }
        for which in PINS {
            match fs::remove_file(pin_path(pins, index, which)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(refused("take the programs back")(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Makes a TAP of this name, and joins it to `interface`, as long as the programs are there.
    fn make(name: &str, interface: &str) -> Result<(File, [OwnedFd; 2]), TapError> {
        let index = index_of(interface)?;
        let there = || TapError::NoInterface(interface.to_owned());
        let mtu = mtu_of(interface).ok_or_else(there)?;
        let (file, name) = tap(name).map_err(refused("make a TAP"))?;
        // It has no addresses of its own. Without IPv6 there is nothing to keep it from having any.
        let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
        bring_up(&name, mtu).map_err(refused("take the TAP up"))?;
        let own = if_nametoindex(name.as_str()).map_err(|_| there())?;
        let join = |program: &[Instruction], interface, leaving| {
            let program = load(program)?;
            attach(&program, interface, leaving)
        };
        let towards = join(&towards_device(own), index, true);
        let from = join(&from_device(index), own, false);
        let join = refused("join the TAP to the interface (that takes Linux 6.6, and root)");
        Ok((file, [towards.map_err(&join)?, from.map_err(&join)?]))
    }

    /// The way in and out for a worker.
    pub(super) fn end(&self) -> io::Result<TapEnd> {
        Ok(TapEnd::new(self.file.try_clone()?))
    }
}

const fn instruction(code: u8, to: u8, from: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction {
        code,
        registers: to | from << 4,
        offset,
        immediate,
    }
}

const MOVE: u8 = 0xbf;
const SET: u8 = 0xb7;
const LOAD_BYTE: u8 = 0x30;
const LOAD_HALF: u8 = 0x28;
const IF_EQUAL: u8 = 0x15;
const IF_NOT: u8 = 0x55;
const IF_BITS: u8 = 0x45;
const GO: u8 = 0x05;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// Sends the frame to an interface: as one that leaves by it, or as one that comes.
const REDIRECT: i32 = 23;
const LEAVES: i32 = 0;
const COMES: i32 = 1;
/// The next program looks at the frame.
const NEXT: i32 = -1;

fn number(interface: u32) -> i32 {
    i32::try_from(interface).unwrap_or_default()
}

/// What the interface of the VM does with frames towards the VM: RoCEv2 goes to the device.
fn towards_device(tap: u32) -> [Instruction; 22] {
    // Jumps count from the instruction behind. All else goes to `NEXT`, at 20.
    [
        /* 0 */ instruction(MOVE, 6, 1, 0, 0),
        /* 1 */ instruction(LOAD_HALF, 0, 0, 0, 12),
        /* 2 */ instruction(IF_EQUAL, 0, 0, 5, 0x0800),
        /* 3 */ instruction(IF_NOT, 0, 0, 16, 0x86dd),
        // IPv6: UDP is the next header, and the port.
        /* 4 */
        instruction(LOAD_BYTE, 0, 0, 0, 20),
        /* 5 */ instruction(IF_NOT, 0, 0, 14, 17),
        /* 6 */ instruction(LOAD_HALF, 0, 0, 0, 56),
        /* 7 */ instruction(GO, 0, 0, 7, 0),
        // IPv4: no options, not a fragment, UDP, and the port.
        /* 8 */
        instruction(LOAD_BYTE, 0, 0, 0, 14),
        /* 9 */ instruction(IF_NOT, 0, 0, 10, 0x45),
        /* 10 */ instruction(LOAD_HALF, 0, 0, 0, 20),
        /* 11 */ instruction(IF_BITS, 0, 0, 8, 0x3fff),
        /* 12 */ instruction(LOAD_BYTE, 0, 0, 0, 23),
        /* 13 */ instruction(IF_NOT, 0, 0, 6, 17),
        /* 14 */ instruction(LOAD_HALF, 0, 0, 0, 36),
        /* 15 */ instruction(IF_NOT, 0, 0, 4, 4791),
        /* 16 */ instruction(SET, 1, 0, 0, number(tap)),
        /* 17 */ instruction(SET, 2, 0, 0, LEAVES),
        /* 18 */ instruction(CALL, 0, 0, 0, REDIRECT),
        /* 19 */ instruction(EXIT, 0, 0, 0, 0),
        /* 20 */ instruction(SET, 0, 0, 0, NEXT),
        /* 21 */ instruction(EXIT, 0, 0, 0, 0),
    ]
}

/// What our TAP does with frames that we write: they come as if the VM had sent them.
fn from_device(interface: u32) -> [Instruction; 4] {
    [
        instruction(SET, 1, 0, 0, number(interface)),
        instruction(SET, 2, 0, 0, COMES),
        instruction(CALL, 0, 0, 0, REDIRECT),
        instruction(EXIT, 0, 0, 0, 0),
    ]
}

/// Bytes of the headers of UDP, of IPv4 without options, and of IPv6.
const UDP: usize = 8;
const IPV4: usize = 20;
const IPV6: usize = 40;
/// Frames of a burst, and bytes of its IP packet, at most.
const MOST: usize = 64;
const MOST_BYTES: usize = 65_000;
/// Frames that are read at a time, at most, and frames that one of these is cut into: a kernel makes
/// no more than that of what it sends or merges, but a neighbour may ask for very short ones.
const AT_A_TIME: usize = 16;
const MOST_CUT: usize = 128;

/// Where the headers of a frame of UDP are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Layout {
    /// Where IP begins.
    ip: usize,
    /// Bytes before the payload of UDP.
    head: usize,
}

impl Layout {
    /// That of a frame, if it is one of IP without options and UDP.
    fn of(frame: &[u8]) -> Option<Self> {
        let (_, ip) = frame::network(frame)?;
        let field = |at: usize| frame.get(ip + at);
        let ethertype = frame.get(ip - 2..ip)?;
        let head = match (ethertype, field(0), field(6), field(9)) {
            ([0x08, 0x00], Some(0x45), _, Some(17)) => ip + IPV4 + UDP,
            ([0x86, 0xdd], _, Some(17), _) => ip + IPV6 + UDP,
            _ => return None,
        };
        (frame.len() > head).then_some(Self { ip, head })
    }

    fn is_ipv4(self) -> bool {
        self.head == self.ip + IPV4 + UDP
    }

    /// The identification of a frame of IPv4.
    fn identification(self, frame: &[u8]) -> Option<u16> {
        let field = frame.get(self.ip + 4..self.ip + 6);
        let field = field.filter(|_| self.is_ipv4())?;
        Some(u16::from_be_bytes(field.try_into().ok()?))
    }

    /// Whether the headers of two frames are the same where those of a burst are.
    fn same(self, one: &[u8], other: &[u8]) -> bool {
        let Self { ip, head } = self;
        // All but length, identification and checksum.
        let parts = if self.is_ipv4() {
            [0..ip + 2, ip + 6..ip + 10, ip + 12..head - 4]
        } else {
            [0..ip + 4, ip + 6..head - 4, 0..0]
        };
        let mut parts = parts.into_iter();
        parts.all(|part| one.get(part.clone()) == other.get(part))
    }

    /// Makes the headers those of a packet with so many bytes of payload, that is number
    /// `identification` of IPv4.
    fn set_lengths(self, frame: &mut [u8], payload: usize, identification: Option<u16>) {
        let Self { ip, head } = self;
        let udp = u16::try_from(UDP + payload).unwrap_or(u16::MAX);
        put(frame, head - 4, udp);
        if self.is_ipv4() {
            put(frame, ip + 2, udp.saturating_add(IPV4 as u16));
            if let Some(identification) = identification {
                put(frame, ip + 4, identification);
            }
            put(frame, ip + 10, 0);
            let sum = checksum(frame.get(ip..ip + IPV4).unwrap_or_default());
            put(frame, ip + 10, sum);
        } else {
            put(frame, ip + 4, udp);
        }
    }
}

fn put(frame: &mut [u8], at: usize, value: u16) {
    if let Some(place) = frame.get_mut(at..at + 2) {
        place.copy_from_slice(&value.to_be_bytes());
    }
}

/// A worker's end of a TAP. Frames that are written one after the other for the same destination, of
/// the same length but for the last one, leave by one system call, as one packet that the kernel cuts
/// where it must; and what comes so is cut here.
#[derive(Debug)]
pub(super) struct TapEnd {
    file: File,
    /// The header, and what waits to be sent: a frame, and of others of its burst what is behind
    /// their headers. It ends at `end`.
    written: Vec<u8>,
    end: usize,
    count: usize,
    /// Headers of its first frame; bytes of the headers of each, and behind them.
    headers: Vec<u8>,
    layout: Layout,
    each: usize,
    /// That of the next frame of IPv4, if it is to go with those before it: where the kernel cuts a
    /// packet, it counts on from the first one.
    identification: u16,
    /// Nothing may follow.
    closed: bool,
    /// Where the next frame is written, and what its headers are over.
    start: usize,
    covered: Vec<u8>,
    /// The kernel takes no bursts.
    singly: bool,
    /// Frames that the system did not take, since it was asked last.
    refused: u64,
    /// What was read.
    read: Vec<u8>,
}

impl TapEnd {
    fn new(file: File) -> Self {
        Self {
            file,
            written: vec![0; HEADER + 2 * LONGEST],
            end: HEADER,
            count: 0,
            headers: Vec::new(),
            layout: Layout::default(),
            each: 0,
            identification: 0,
            closed: false,
            start: HEADER,
            covered: Vec::new(),
            singly: false,
            refused: 0,
            read: vec![0; HEADER + LONGEST],
        }
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// As [`super::Port::identification`].
    pub(super) fn identification(&self) -> u16 {
        self.identification
    }

    /// Room for a frame of `len` bytes; `None` if no frame is so long. What waits is sent before, if
    /// this one cannot go with it.
    pub(super) fn begin(&mut self, len: usize) -> Option<&mut [u8]> {
        if len > LONGEST {
            return None;
        }
        self.uncover();
        let head = self.layout.head;
        let more = len.saturating_sub(head);
        let joins = !self.closed
            && (1..=self.each).contains(&more)
            && self.count < MOST
            && self.end + more <= MOST_BYTES;
        if self.count != 0 && !joins {
            self.send();
        }
        self.start = self.end;
        if self.count != 0 {
            // Its headers go over the end of the frame before, which comes back.
            self.start -= head;
            let covered = self.written.get(self.start..self.end);
            self.covered.extend_from_slice(covered.unwrap_or_default());
        }
        self.written.get_mut(self.start..self.start + len)
    }

    /// The frame of [`Self::begin`], of `len` bytes.
    pub(super) fn written(&mut self, len: usize) -> &mut [u8] {
        let place = self.start..self.start + len;
        self.written.get_mut(place).unwrap_or_default()
    }

    /// The frame of [`Self::begin`], of `len` bytes, is written.
    pub(super) fn end(&mut self, len: usize) {
        if self.count == 0 {
            return self.first(len);
        }
        let frame = self.written.get_mut(self.start..self.start + len);
        let frame = frame.unwrap_or_default();
        let layout = self.layout;
        let number = layout.identification(frame);
        let in_order = number.is_none_or(|number| number == self.identification);
        if !in_order || !layout.same(&self.headers, frame) {
            return self.first_of_next(len);
        }
        let payload = len - layout.head;
        self.uncover();
        self.end += payload;
        self.count += 1;
        self.identification = self.identification.wrapping_add(1);
        self.closed = payload < self.each;
    }

    /// The frame of [`Self::begin`], of `len` bytes, cannot go with those that wait: they are sent, and
    /// it is the first of the next burst.
    fn first_of_next(&mut self, len: usize) {
        // Its headers are over the end of the frame before: each goes where the other one is. What is
        // behind its headers stays where it is while the others are sent.
        let covered = self.start..self.start + self.covered.len();
        let behind = covered.end..self.start + len;
        if let Some(place) = self.written.get_mut(covered) {
            place.swap_with_slice(&mut self.covered);
        }
        let mut headers = std::mem::take(&mut self.covered);
        self.send();
        let head = HEADER + headers.len();
        if behind.start <= behind.end && behind.end <= self.written.len() {
            self.written.copy_within(behind, head);
        }
        if let Some(place) = self.written.get_mut(HEADER..head) {
            place.copy_from_slice(&headers);
        }
        headers.clear();
        self.covered = headers;
        self.first(len);
    }

    /// A frame of `len` bytes is at the beginning.
    fn first(&mut self, len: usize) {
        let frame = self.written.get(HEADER..HEADER + len).unwrap_or_default();
        let layout = Layout::of(frame).filter(|_| !self.singly);
        self.layout = layout.unwrap_or_default();
        let head = self.layout.head;
        let number = self.layout.identification(frame);
        self.identification = number.unwrap_or_default().wrapping_add(1);
        self.headers.clear();
        self.headers.extend(frame.iter().take(head));
        self.each = len - head;
        self.closed = layout.is_none();
        self.end = HEADER + len;
        self.count = 1;
    }

    /// The frame before has its end again.
    fn uncover(&mut self) {
        let place = self.start..self.start + self.covered.len();
        if let Some(place) = self.written.get_mut(place) {
            place.copy_from_slice(&self.covered);
        }
        self.covered.clear();
    }

    /// Sends what waits. Returns how many frames the system did not take since it was called last.
    pub(super) fn flush(&mut self) -> u64 {
        if self.count != 0 {
            self.send();
        }
        std::mem::take(&mut self.refused)
    }

    fn send(&mut self) {
        self.uncover();
        let count = std::mem::take(&mut self.count);
        let end = std::mem::replace(&mut self.end, HEADER);
        self.closed = false;
        if count == 1 {
            if let Some(header) = self.written.get_mut(..HEADER) {
                header.fill(0);
            }
            let sent = (&self.file).write(self.written.get(..end).unwrap_or_default());
            self.refused += u64::from(sent.is_err());
            return;
        }
        self.offload(end);
        let sent = (&self.file).write(self.written.get(..end).unwrap_or_default());
        match sent {
            Ok(_) => {}
            // Kernels before 6.2 cut no UDP.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                self.singly = true;
                let mut cut = vec![0; HEADER];
                let burst = self.written.get(HEADER..end).unwrap_or_default();
                for_each_frame(burst, self.layout, self.each, &mut cut, |frame| {
                    let sent = (&self.file).write(frame);
                    self.refused += u64::from(sent.is_err());
                    frame.truncate(HEADER);
                });
            }
            Err(_) => self.refused += count as u64,
        }
    }

    /// Makes headers of the burst that is written up to `end`, for the kernel to cut it.
    fn offload(&mut self, end: usize) {
        let (layout, each) = (self.layout, self.each);
        let Layout { ip, head } = layout;
        let Some((header, frame)) = self.written.split_at_mut_checked(HEADER) else {
            return;
        };
        let words = [
            (2, head),
            (4, each),
            (6, head - UDP),
            // Of the checksum in the header of UDP.
            (8, 6),
        ];
        header[0] = NEEDS_CHECKSUM;
        header[1] = UDP_SEGMENTS;
        for (at, value) in words {
            let value = u16::try_from(value).unwrap_or_default();
            header[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        let payload = end - HEADER - head;
        layout.set_lengths(frame, payload, None);
        // The sum of what is not in the packet: addresses, length and protocol. The addresses are last
        // in the headers of IP.
        let addresses = if layout.is_ipv4() { 12 } else { 8 };
        let addresses = frame.get(ip + addresses..head - UDP).unwrap_or_default();
        let sum = folded(17 + (UDP + payload) as u32, addresses);
        put(frame, head - 2, sum);
    }

    /// Reads frames that have come on a segment; false if there are none.
    pub(super) fn receive(&mut self, segment: Segment, burst: &mut Burst) -> bool {
        burst.clear();
        for _ in 0..AT_A_TIME {
            let Ok(len) = (&self.file).read(&mut self.read) else {
                break;
            };
            let Some((header, frame)) = self.read.get_mut(..len).and_then(split_header) else {
                continue;
            };
            if header[1] & UDP_KIND == UDP_SEGMENTS {
                let each = usize::from(u16::from_le_bytes([header[4], header[5]]));
                if let Some(layout) = Layout::of(frame).filter(|_| each != 0) {
                    let (bytes, frames) = burst.parts();
                    let mut start = bytes.len();
                    for_each_frame(frame, layout, each, bytes, |bytes| {
                        frames.push(Arrived::new(segment, start..bytes.len()));
                        start = bytes.len();
                    });
                }
            } else {
                burst.push(segment, frame);
            }
            if burst.is_full() {
                break;
            }
        }
        !burst.frames.is_empty()
    }
}

/// `virtio_net_hdr`: the checksum is to be made; frames of UDP are to be cut, and the bits that say
/// what is to be cut.
const NEEDS_CHECKSUM: u8 = 1;
const UDP_SEGMENTS: u8 = 5;
const UDP_KIND: u8 = 0x7f;

fn split_header(bytes: &mut [u8]) -> Option<(&mut [u8; HEADER], &mut [u8])> {
    bytes.split_first_chunk_mut()
}

/// Cuts a burst into the frames that it is made of, each of `each` bytes behind its headers but for
/// the last one. They are made in `space`, behind what is there; `visit` sees it after each.
fn for_each_frame(
    burst: &[u8],
    layout: Layout,
    each: usize,
    space: &mut Vec<u8>,
    mut visit: impl FnMut(&mut Vec<u8>),
) {
    let Layout { ip, head } = layout;
    let Some((headers, payload)) = burst.split_at_checked(head) else {
        return;
    };
    let first = headers.get(ip + 4..ip + 6).map_or(0, |bytes| {
        u16::from_be_bytes(bytes.try_into().unwrap_or_default())
    });
    let parts = payload.chunks(each.max(1)).take(MOST_CUT);
    for (number, part) in (0u16..).zip(parts) {
        let start = space.len();
        space.extend_from_slice(headers);
        space.extend_from_slice(part);
        let frame = space.get_mut(start..).unwrap_or_default();
        layout.set_lengths(frame, part.len(), Some(first.wrapping_add(number)));
        // Its checksum is not there; the ICRC is.
        put(frame, head - 2, 0);
        visit(space);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use proptest::prelude::*;

    use super::*;

    /// What a program makes of a frame: where it redirects it to and how, or nothing.
    fn carry_out(program: &[Instruction], frame: &[u8]) -> Option<(i32, i32)> {
        let mut registers = [0i32; 8];
        let mut at = 0usize;
        loop {
            let Instruction {
                code,
                registers: which,
                offset,
                immediate,
            } = program[at];
            at += 1;
            let to = usize::from(which & 15);
            let mut go = |taken: bool| {
                if taken {
                    at = at.checked_add_signed(offset.into()).unwrap();
                }
            };
            let place = usize::try_from(immediate).unwrap_or_default();
            match code {
                MOVE => assert_eq!((to, which >> 4), (6, 1), "the frame"),
                SET => registers[to] = immediate,
                LOAD_BYTE => match frame.get(place) {
                    Some(byte) => registers[0] = i32::from(*byte),
                    // A look behind the end ends the program.
                    None => return None,
                },
                LOAD_HALF => match frame.get(place..place + 2) {
                    Some(two) => registers[0] = i32::from(two[0]) << 8 | i32::from(two[1]),
                    None => return None,
                },
                IF_EQUAL => go(registers[0] == immediate),
                IF_NOT => go(registers[0] != immediate),
                IF_BITS => go(registers[0] & immediate != 0),
                GO => go(true),
                CALL => {
                    assert_eq!((immediate, program[at].code), (REDIRECT, EXIT));
                    return Some((registers[1], registers[2]));
                }
                EXIT => {
                    assert_eq!(registers[0], NEXT);
                    return None;
                }
                other => panic!("{other:#x}"),
            }
        }
    }

    fn ipv4() -> Vec<u8> {
        let mut frame = vec![0; 100];
        frame[12] = 8;
        (frame[14], frame[23]) = (0x45, 17);
        frame[36..38].copy_from_slice(&4791u16.to_be_bytes());
        frame
    }

    fn ipv6() -> Vec<u8> {
        let mut frame = vec![0; 100];
        frame[12..14].copy_from_slice(&[0x86, 0xdd]);
        (frame[14], frame[20]) = (0x60, 17);
        frame[56..58].copy_from_slice(&4791u16.to_be_bytes());
        frame
    }

    #[test]
    fn rocev2_goes_to_the_device_and_all_else_to_the_vm() {
        let program = towards_device(7);
        for frame in [ipv4(), ipv6()] {
            assert_eq!(carry_out(&program, &frame), Some((7, LEAVES)));
            // Don't fragment is no fragment.
            let mut whole = frame.clone();
            whole[20] |= if frame[12] == 8 { 0x40 } else { 0 };
            assert_eq!(carry_out(&program, &whole), Some((7, LEAVES)));
            for len in 0..36 {
                assert_eq!(carry_out(&program, &frame[..len]), None);
            }
        }
        for (mut frame, at, byte) in [
            (ipv4(), 13, 6),
            (ipv4(), 14, 0x46),
            (ipv4(), 20, 0x20),
            (ipv4(), 21, 1),
            (ipv4(), 23, 6),
            (ipv4(), 37, 0),
            (ipv6(), 12, 0x81),
            (ipv6(), 20, 6),
            (ipv6(), 57, 0),
        ] {
            frame[at] = byte;
            assert_eq!(carry_out(&program, &frame), None, "{at}");
        }
    }

    #[test]
    fn what_the_device_sends_comes_by_the_interface_of_the_vm() {
        assert_eq!(carry_out(&from_device(9), &[0; 60]), Some((9, COMES)));
    }

    /// A frame of RoCEv2 with so many bytes of UDP, the last of which are its ICRC.
    fn rocev2(ipv6: bool, len: usize, to: u8) -> Vec<u8> {
        let mut frame = if ipv6 { ipv6_head() } else { ipv4_head() };
        let head = frame.len();
        frame[if ipv6 { 53 } else { 33 }] = to;
        frame.extend((0..len - 4).map(|at| (at * 7 + len) as u8));
        let layout = Layout { ip: 14, head };
        layout.set_lengths(&mut frame, len, None);
        let crc = frame::crc_of(&frame);
        frame.extend(crc);
        frame
    }

    /// The same, in a VLAN.
    fn in_vlan(mut frame: Vec<u8>, number: u8) -> Vec<u8> {
        frame.splice(12..12, [0x81, 0, 0, number]);
        frame
    }

    fn ipv4_head() -> Vec<u8> {
        let mut head = ipv4();
        head.truncate(42);
        head
    }

    fn ipv6_head() -> Vec<u8> {
        let mut head = ipv6();
        head.truncate(62);
        head
    }

    /// Two ends that are joined: what one sends, the other receives.
    fn joined() -> (TapEnd, TapEnd) {
        let (a, b) = UnixDatagram::pair().unwrap();
        b.set_nonblocking(true).unwrap();
        let [a, b] = [a, b].map(|end| TapEnd::new(File::from(OwnedFd::from(end))));
        (a, b)
    }

    /// Sends a frame with the identification that it should have.
    fn send(end: &mut TapEnd, frame: &[u8]) {
        let mut frame = frame.to_vec();
        if let Some(layout) = Layout::of(&frame).filter(|layout| layout.is_ipv4()) {
            let payload = frame.len() - layout.head;
            layout.set_lengths(&mut frame, payload, Some(end.identification()));
            if let Some((covered, crc)) = frame.split_last_chunk_mut() {
                *crc = frame::crc_of(covered);
            }
        }
        end.begin(frame.len()).unwrap().copy_from_slice(&frame);
        end.end(frame.len());
    }

    /// What has come, and by how many calls.
    fn received(end: &mut TapEnd) -> (usize, Vec<Vec<u8>>) {
        let mut packets = 0;
        let mut frames = Vec::new();
        let mut space = vec![0; HEADER + LONGEST];
        while let Ok(len) = (&end.file).read(&mut space) {
            packets += 1;
            // What a kernel does, and what an end does, with what it reads.
            let (a, b) = UnixDatagram::pair().unwrap();
            a.send(&space[..len]).unwrap();
            b.set_nonblocking(true).unwrap();
            let mut again = TapEnd::new(File::from(OwnedFd::from(b)));
            let mut burst = Burst::default();
            assert!(again.receive(Segment::Own(3), &mut burst));
            for (segment, frame, lost) in burst.frames() {
                assert_eq!((segment, lost), (Segment::Own(3), None));
                frames.push(frame.to_vec());
            }
        }
        (packets, frames)
    }

    /// They are the same but for what differs between frames of a burst; ICRCs and checksums are
    /// right.
    fn assert_same(sent: &[Vec<u8>], came: &[Vec<u8>]) {
        assert_eq!(came.len(), sent.len());
        for (came, sent) in came.iter().zip(sent) {
            let layout = Layout::of(sent).unwrap();
            let Layout { ip, head } = layout;
            assert_eq!(came.len(), sent.len());
            assert!(layout.same(came, sent));
            let body = head..sent.len() - 4;
            assert_eq!(came[body.clone()], sent[body]);
            let (covered, crc) = came.split_last_chunk().unwrap();
            assert_eq!(frame::crc_of(covered), *crc);
            if layout.is_ipv4() {
                let header = &came[ip..ip + IPV4];
                assert_eq!(checksum(header), 0, "the checksum of IPv4");
            }
        }
    }

    #[test]
    fn frames_of_a_length_leave_together_and_are_what_they_were() {
        for (ipv6, tagged) in [(false, false), (true, false), (false, true), (true, true)] {
            let (mut a, mut b) = joined();
            let lens = [1044, 1044, 1044, 30, 1044, 20, 20, 20, 20, 4000, 1000, 1000];
            let frames = lens.iter().map(|len| rocev2(ipv6, *len, 2));
            let sent: Vec<_> = if tagged {
                frames.map(|frame| in_vlan(frame, 5)).collect()
            } else {
                frames.collect()
            };
            for frame in &sent {
                send(&mut a, frame);
            }
            assert_eq!(a.flush(), 0);
            let (packets, came) = received(&mut b);
            assert_same(&sent, &came);
            assert_eq!(packets, 5);
            assert_eq!(a.flush(), 0);
            assert_eq!(received(&mut b).0, 0);
        }
    }

    #[test]
    fn frames_of_others_do_not_go_with_them() {
        let (mut a, mut b) = joined();
        let mut sent: Vec<_> = [2, 2, 3, 3, 2].map(|to| rocev2(false, 100, to)).into();
        sent.extend([
            rocev2(true, 100, 2),
            rocev2(true, 80, 2),
            rocev2(false, 80, 2),
            in_vlan(rocev2(false, 80, 2), 1),
            in_vlan(rocev2(false, 80, 2), 1),
            in_vlan(rocev2(false, 80, 2), 2),
        ]);
        // One that is none of UDP is sent as it is.
        let mut other = rocev2(false, 100, 2);
        other[23] = 1;
        for frame in sent.iter().chain([&other, &other]) {
            send(&mut a, frame);
        }
        a.flush();
        let (packets, mut came) = received(&mut b);
        assert_eq!(came.split_off(sent.len()), [other.clone(), other]);
        assert_same(&sent, &came);
        assert_eq!(packets, 9);
    }

    /// Neither those that go together nor those that do not: once all buffers are as large as they get.
    #[test]
    fn frames_allocate_nothing() {
        let (mut a, mut b) = joined();
        let mut burst = Burst::default();
        let frames = [
            (2, 1000),
            (2, 1000),
            (3, 1000),
            (2, 4000),
            (3, 4000),
            (3, 20),
        ];
        let frames = frames.map(|(to, len)| rocev2(true, len, to));
        let mut round = || {
            for frame in &frames {
                a.begin(frame.len()).unwrap().copy_from_slice(frame);
                a.end(frame.len());
            }
            assert_eq!(a.flush(), 0);
            let mut came = 0;
            while b.receive(Segment::Own(0), &mut burst) {
                came += burst.frames().count();
            }
            assert_eq!(came, frames.len());
        };
        round();
        let counted = allocation_counter::measure(|| (0..100).for_each(|_| round()));
        assert_eq!(counted.count_total, 0);
    }

    /// The kernel would give another identification to one that is not in order, so it leaves by itself.
    #[test]
    fn frames_with_other_identifications_do_not_go_together() {
        let (mut a, mut b) = joined();
        let frame = rocev2(false, 100, 2);
        for _ in 0..2 {
            a.begin(frame.len()).unwrap().copy_from_slice(&frame);
            a.end(frame.len());
        }
        send(&mut a, &frame);
        a.flush();
        let (packets, came) = received(&mut b);
        assert_same(&[0; 3].map(|_| frame.clone()), &came);
        assert_eq!(packets, 2);
    }

    /// Its memory could not be read, or it is to be lost. Its headers were over the end of the one before.
    #[test]
    fn a_frame_that_is_not_ended_leaves_the_others_as_they_are() {
        for (ipv6, last) in [(false, false), (true, false), (false, true), (true, true)] {
            let (mut a, mut b) = joined();
            let mut sent = Vec::new();
            for number in 0..6 {
                if number % 2 == 1 {
                    a.begin(1044).unwrap().fill(0xff);
                    a.begin(500).unwrap().fill(0xfe);
                    assert_eq!(a.written(500), [0xfe; 500]);
                }
                sent.push(rocev2(ipv6, 1044, 2));
                send(&mut a, &sent[number]);
            }
            if last {
                a.begin(1044).unwrap().fill(0xfd);
            }
            a.flush();
            let (packets, came) = received(&mut b);
            assert_same(&sent, &came);
            assert_eq!(packets, 1);
        }
    }

    #[test]
    fn a_burst_has_its_limits() {
        let (mut a, mut b) = joined();
        let small: Vec<_> = (0..150).map(|_| rocev2(false, 60, 2)).collect();
        let large: Vec<_> = (0..20).map(|_| rocev2(true, 8000, 2)).collect();
        for frames in [&small, &large] {
            for frame in frames {
                send(&mut a, frame);
            }
            a.flush();
            let (packets, came) = received(&mut b);
            assert_same(frames, &came);
            assert_eq!(packets, 3);
        }
        assert!(a.begin(LONGEST + 1).is_none());
    }

    proptest! {
        /// Whatever comes with whatever header: nothing breaks.
        #[test]
        fn anything_may_come(
            header: [u8; HEADER], cut: bool, each in 0u16..200, ipv6: bool, tagged: bool,
            len in 24usize..3000,
            damage in proptest::option::of((0usize..3000, any::<u8>())),
        ) {
            let mut frame = rocev2(ipv6, len, 2);
            if tagged {
                frame = in_vlan(frame, 5);
            }
            if let Some((at, byte)) = damage {
                let at = at % frame.len();
                frame[at] = byte;
            }
            let mut header = header;
            if cut {
                header[1] = UDP_SEGMENTS;
                header[4..6].copy_from_slice(&each.to_le_bytes());
            }
            let (a, b) = UnixDatagram::pair().unwrap();
            b.set_nonblocking(true).unwrap();
            a.send(&[&header[..], &frame].concat()).unwrap();
            let mut end = TapEnd::new(File::from(OwnedFd::from(b)));
            let mut burst = Burst::default();
            let came = end.receive(Segment::Own(0), &mut burst);
            prop_assert!(burst.frames().count() <= MOST_CUT);
            prop_assert_eq!(came, burst.frames().next().is_some());
        }
    }

    #[test]
    fn interfaces_are_there_or_not() {
        assert_eq!(mtu_of("lo"), Some(65_536));
        for name in ["", "no-such-one", "a-name-that-is-too-long"] {
            assert_eq!(mtu_of(name), None);
        }
        let error = Tap::join("no-such-one").unwrap_err();
        assert_eq!(error.to_string(), "there is no interface no-such-one");
    }
}
