// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The port of a VM whose network interface the host has as an interface of its own, such as the TAP
//! of QEMU: RDMA packets go in and out there, beside all others of the VM.
//!
//! A TAP of ours is joined to that interface by two programs in the kernel. What leaves the host by
//! the interface, towards the VM, and is RoCEv2, goes to our TAP instead. What we write to our TAP
//! comes to the host as if the VM had sent it: bridges, filters and routes see it where they see the
//! VM. When this process ends, all goes to the VM again.
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use nix::net::if_::if_nametoindex;

use super::kernel::{attach, bring_up, load, mtu, tap, Instruction};

/// Bytes of the header that is before each frame (`virtio_net_hdr`). Zeros: nothing is left to do.
const HEADER: usize = 10;
/// Longest frame, bytes.
const LONGEST: usize = 1 << 16;

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
    /// They last as long as these are open.
    _programs: [OwnedFd; 2],
}

/// The longest IP packet of an interface, bytes, if there is one.
pub(crate) fn mtu_of(interface: &str) -> Option<usize> {
    mtu(interface).ok()
}

impl Tap {
    /// Makes a TAP, and joins it to `interface`.
    ///
    /// # Errors
    /// If there is no such interface, or the system refuses: it takes CAP_NET_ADMIN and CAP_BPF, and
    /// Linux 6.6.
    pub fn join(interface: &str) -> Result<Self, TapError> {
        let there = || TapError::NoInterface(interface.to_owned());
        let index = if_nametoindex(interface).map_err(|_| there())?;
        let mtu = mtu_of(interface).ok_or_else(there)?;
        let refused = |what| move |error| TapError::System(what, error);
        let (file, name) = tap("vrdma%d").map_err(refused("make a TAP"))?;
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
        Ok(Self {
            file,
            _programs: [towards.map_err(join)?, from.map_err(join)?],
        })
    }

    /// The way in and out for a worker.
    pub(super) fn end(&self) -> io::Result<TapEnd> {
        Ok(TapEnd {
            file: self.file.try_clone()?,
            written: vec![0; HEADER + LONGEST],
            refused: 0,
        })
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

/// A worker's end of a TAP.
#[derive(Debug)]
pub(super) struct TapEnd {
    file: File,
    /// The frame that is written, behind its header.
    written: Vec<u8>,
    /// Frames that the system did not take, since it was asked last.
    refused: u64,
}

impl TapEnd {
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Room for a frame of `len` bytes; `None` if no frame is so long.
    pub(super) fn begin(&mut self, len: usize) -> Option<&mut [u8]> {
        self.written.get_mut(HEADER..HEADER + len)
    }

    /// Sends the frame of [`Self::begin`], of `len` bytes.
    pub(super) fn end(&mut self, len: usize) {
        let bytes = self.written.get(..HEADER + len).unwrap_or_default();
        let sent = (&self.file).write(bytes);
        self.refused += u64::from(sent.is_err());
    }

    /// How many frames the system did not take since it was asked last.
    pub(super) fn flush(&mut self) -> u64 {
        std::mem::take(&mut self.refused)
    }

    /// Reads a frame into `space`, behind its header; `None` if none has come. Returns where it is.
    pub(super) fn receive(&mut self, space: &mut [u8]) -> Option<std::ops::Range<usize>> {
        let bytes = (&self.file).read(space).ok()?;
        (bytes > HEADER).then_some(HEADER..bytes)
    }
}

#[cfg(test)]
mod tests {
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
