// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a TAP carries at most: bursts of UDP packets of the length of ours, from one to another.
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure, Context, Result};

use crate::native::wire::{burst_rate, BURST, MEMORY, PAYLOAD};
use crate::native::{pin, settle, Cores, Settings};

/// Of a packet, behind its UDP header: what RoCEv2 has before the payload, and behind it.
const BEFORE: usize = 12 + 16;
const PACKET: usize = BEFORE + PAYLOAD + 4;
/// `virtio_net_hdr`, and the headers of Ethernet, IPv4 and UDP.
const OFFLOAD: usize = 10;
const ETHERNET: usize = 14;
const IP: usize = 20;
const UDP: usize = 8;
const DATA: usize = OFFLOAD + ETHERNET + IP + UDP;
/// Not that of RoCEv2, whose packets go to the device.
const PORT: u16 = 4793;
const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 3, 1], [2, 0, 0, 0, 3, 2]];
/// What a packet of one byte says: a burst has come, or it was the last one.
const CAME: u8 = 1;
const LAST: u8 = 2;
const PATIENCE: Duration = Duration::from_secs(5);

/// GB/s of what the packets would carry. With `copies`, payloads are copied from memory to bursts, and from
/// bursts to memory, and a checksum of each is computed at both ends.
pub fn bursts(settings: &Settings, [sender, receiver]: &[File; 2], copies: bool) -> Result<f64> {
    let Cores { driver, worker } = settings.cores;
    let time = 4 * settings.time();
    settle();
    let [sender, receiver] = [End(sender, 0), End(receiver, 1)];
    std::thread::scope(|scope| {
        let end = scope.spawn(move || {
            pin(&[worker])?;
            receive(receiver, copies)
        });
        pin(&[driver])?;
        let rate = send(sender, time, copies);
        let received = end.join().map_err(|_| anyhow!("a thread panicked"))?;
        // If nothing was sent, nothing comes.
        let rate = rate?;
        received?;
        Ok(rate)
    })
}

fn send(end: End<'_>, time: Duration, copies: bool) -> Result<f64> {
    let memory = vec![1; MEMORY];
    let mut burst = vec![0; DATA + BURST * PACKET];
    let mut answer = vec![0; 1 << 16];
    end.headers(&mut burst);
    let mut sources = memory.chunks_exact(PAYLOAD).cycle();
    let next = || {
        let packets = burst[DATA..].chunks_exact_mut(PACKET);
        for packet in packets.filter(|_| copies) {
            let source = sources.next().context("no memory")?;
            let (payload, crc) = packet[BEFORE..].split_at_mut(PAYLOAD);
            payload.copy_from_slice(source);
            crc.copy_from_slice(&crc32fast::hash(payload).to_le_bytes());
        }
        end.write(&burst)
    };
    let rate = burst_rate(time, next, || end.read(&mut answer).map(drop))?;
    end.say(LAST)?;
    Ok(rate * (BURST * PAYLOAD) as f64 / 1e9)
}

/// Receives bursts until it was the last one, and answers each.
fn receive(end: End<'_>, copies: bool) -> Result<()> {
    let mut memory = vec![0; MEMORY];
    let mut burst = vec![0; 1 << 16];
    let (mut at, mut packets) = (0, 0);
    loop {
        let data = end.read(&mut burst)?;
        if data == [LAST] {
            return Ok(());
        }
        for packet in data.chunks_exact(PACKET) {
            if copies {
                let (payload, crc) = packet[BEFORE..].split_at(PAYLOAD);
                ensure!(
                    crc == crc32fast::hash(payload).to_le_bytes(),
                    "a packet is damaged"
                );
                memory[at..at + PAYLOAD].copy_from_slice(payload);
                at = (at + PAYLOAD) % MEMORY;
            }
            packets += 1;
            if packets % BURST == 0 {
                end.say(CAME)?;
            }
        }
    }
}

/// A TAP, and which of the two it is.
struct End<'a>(&'a File, usize);

impl End<'_> {
    /// The next packet or burst for this end, from behind its headers.
    fn read<'a>(&self, buffer: &'a mut [u8]) -> Result<&'a [u8]> {
        let mut file = self.0;
        let begin = Instant::now();
        let count = loop {
            match file.read(buffer) {
                // The system's own packets come, too.
                Ok(count) if count > DATA && is_ours(&buffer[OFFLOAD..DATA]) => break count,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
                Err(error) => return Err(error.into()),
            }
            ensure!(begin.elapsed() < PATIENCE, "no packet comes");
        };
        Ok(&buffer[DATA..count])
    }

    fn write(&self, frame: &[u8]) -> Result<()> {
        let mut file = self.0;
        let count = file.write(frame)?;
        ensure!(count == frame.len(), "{count} bytes were taken");
        Ok(())
    }

    fn say(&self, what: u8) -> Result<()> {
        let mut frame = [0; DATA + 1];
        frame[DATA] = what;
        self.headers(&mut frame);
        self.write(&frame)
    }

    /// Fills in what is before the data of a packet to the other end, or of a burst.
    fn headers(&self, frame: &mut [u8]) {
        let Self(_, own) = self;
        let other = 1 - own;
        let datagram = frame.len() - DATA + UDP;
        let (headers, _) = frame.split_at_mut(DATA);
        let (offload, headers) = headers.split_at_mut(OFFLOAD);
        let (ethernet, headers) = headers.split_at_mut(ETHERNET);
        let (ip, udp) = headers.split_at_mut(IP);
        ethernet[..6].copy_from_slice(&MACS[other]);
        ethernet[6..12].copy_from_slice(&MACS[*own]);
        ethernet[12..].copy_from_slice(&0x0800u16.to_be_bytes());
        // Lengths fit: a burst is not longer than an IP packet may be.
        let length = |bytes: usize| (bytes as u16).to_be_bytes();
        ip.fill(0);
        ip[0] = 0x45;
        ip[2..4].copy_from_slice(&length(IP + datagram));
        // Not to be cut, 64 hops, UDP; addresses 10.0.3.1 and 10.0.3.2.
        ip[6] = 0x40;
        ip[8] = 64;
        ip[9] = 17;
        ip[12..16].copy_from_slice(&[10, 0, 3, *own as u8 + 1]);
        ip[16..20].copy_from_slice(&[10, 0, 3, other as u8 + 1]);
        let checksum = !sum(ip);
        ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        udp[..2].copy_from_slice(&PORT.to_be_bytes());
        udp[2..4].copy_from_slice(&PORT.to_be_bytes());
        udp[4..6].copy_from_slice(&length(datagram));
        if datagram <= UDP + PACKET {
            return;
        }
        // The kernel cuts it where it must, and begins checksums with this sum of the pseudo-header.
        let mut pseudo = [0; 12];
        pseudo[..8].copy_from_slice(&ip[12..20]);
        pseudo[9] = 17;
        pseudo[10..].copy_from_slice(&length(datagram));
        udp[6..].copy_from_slice(&sum(&pseudo).to_be_bytes());
        // A checksum is needed, UDP, length of all headers and of a packet's data, where the former covers
        // from, and where it is there.
        offload[..2].copy_from_slice(&[1, 5]);
        let numbers = [ETHERNET + IP + UDP, PACKET, ETHERNET + IP, 6];
        for (to, number) in offload[2..].chunks_exact_mut(2).zip(numbers) {
            to.copy_from_slice(&(number as u16).to_le_bytes());
        }
    }
}

fn is_ours(headers: &[u8]) -> bool {
    let (ethernet, headers) = headers.split_at(ETHERNET);
    let (ip, udp) = headers.split_at(IP);
    ethernet[12..] == 0x0800u16.to_be_bytes() && ip[9] == 17 && udp[2..4] == PORT.to_be_bytes()
}

/// The sum of which Internet checksums are the complement.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks_exact(2);
    let sum: u32 = words
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
        .sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}
