// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An Ethernet switch between VMs and the device processes of their hosts. What a NIC does in one
//! piece is in two here, the VM's network interface and its RDMA device, with one MAC address: UDP
//! datagrams for RoCEv2's port go to the device, all else to the interface.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_recv_buffer_size_force};

use super::{link, mac};

/// RoCEv2's UDP port.
const ROCE: u16 = 4791;

/// The longest frame.
const LONGEST: usize = 1 << 16;

/// Bytes of a device's frames that may wait.
const RECEIVED: usize = 64 << 20;

/// How often threads look whether they are to end.
const LOOK: Duration = Duration::from_millis(100);

/// How long a VM may keep a frame from being written.
const STUCK: Duration = Duration::from_secs(1);

/// Of so many frames, some are lost.
const PER: u64 = 10_000;

/// A VM and its device.
struct Port {
    mac: [u8; 6],
    /// QEMU's end of the network interface.
    stream: Mutex<Option<UnixStream>>,
    /// What the device sends comes here,
    socket: UdpSocket,
    /// and what is for it goes there.
    device: SocketAddr,
    /// RoCEv2 goes to the device, and not to the interface.
    steered: AtomicBool,
}

/// What all threads know.
struct Shared {
    ports: Vec<Port>,
    ended: AtomicBool,
    /// How many RoCEv2 frames are lost, per ten thousand.
    lost: AtomicU32,
    /// RoCEv2 frames so far.
    frames: AtomicU64,
}

/// The switch. It ends when it is dropped.
pub struct Switch {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Switch {
    /// Starts one for `vms` VMs, whose QEMUs connect to the links of `directory`.
    pub fn start(directory: &Path, vms: u8) -> Result<Self> {
        let mut ports = Vec::new();
        let mut listeners = Vec::new();
        for number in 1..=vms {
            let path = link(directory, number);
            let listener = UnixListener::bind(&path)
                .with_context(|| format!("cannot bind {}", path.display()))?;
            listener.set_nonblocking(true)?;
            listeners.push(listener);
            let (at, device) = addresses(number);
            let socket = UdpSocket::bind(at).with_context(|| format!("cannot bind {at}"))?;
            socket.set_read_timeout(Some(LOOK))?;
            // Only root may have so much; then nothing is lost here.
            if set_socket_recv_buffer_size_force(&socket, RECEIVED).is_err() {
                set_socket_recv_buffer_size(&socket, RECEIVED)?;
            }
            ports.push(Port {
                mac: parse_mac(&mac(number)).context("no MAC address")?,
                stream: Mutex::new(None),
                socket,
                device,
                steered: AtomicBool::new(true),
            });
        }
        let shared = Arc::new(Shared {
            ports,
            ended: AtomicBool::new(false),
            lost: AtomicU32::new(0),
            frames: AtomicU64::new(0),
        });
        let mut threads = Vec::new();
        for (from, listener) in listeners.into_iter().enumerate() {
            let of_vm = shared.clone();
            threads.push(std::thread::spawn(move || of_vm.serve_vm(from, &listener)));
            let of_device = shared.clone();
            threads.push(std::thread::spawn(move || of_device.serve_device(from)));
        }
        Ok(Self { shared, threads })
    }

    /// Whether RoCEv2 for a VM goes to its device, or to its network interface, as for Soft-RoCE.
    pub fn steer(&self, number: u8, to_device: bool) {
        let port = usize::from(number).checked_sub(1);
        if let Some(port) = port.and_then(|port| self.shared.ports.get(port)) {
            port.steered.store(to_device, Ordering::Relaxed);
        }
    }

    /// Loses so many RoCEv2 frames of ten thousand from now on.
    pub fn lose(&self, of_ten_thousand: u32) {
        self.shared.lost.store(of_ten_thousand, Ordering::Relaxed);
    }

    /// Whether frames are lost now.
    pub fn loses(&self) -> bool {
        self.shared.lost.load(Ordering::Relaxed) != 0
    }

    /// RoCEv2 frames so far.
    pub fn frames(&self) -> u64 {
        self.shared.frames.load(Ordering::Relaxed)
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Where the switch has frames of the device of a VM, and where the device has them.
pub fn addresses(number: u8) -> (SocketAddr, SocketAddr) {
    let at = |port| SocketAddr::from(([127, 0, 1, number], port));
    (at(4795), at(4796))
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let bytes = text
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16).ok());
    bytes.collect::<Option<Vec<_>>>()?.try_into().ok()
}

/// Whether a frame is a UDP datagram over IP for RoCEv2's port. (None of them is a fragment.)
fn is_roce(frame: &[u8]) -> bool {
    let u16_at = |at: usize| {
        let bytes = frame.get(at..)?.first_chunk::<2>()?;
        Some(u16::from_be_bytes(*bytes))
    };
    let (protocol, port) = match u16_at(12) {
        Some(0x0800) => (23, 14 + 20 + 2),
        Some(0x86dd) => (20, 14 + 40 + 2),
        _ => return false,
    };
    frame.get(protocol) == Some(&17) && u16_at(port) == Some(ROCE)
}

impl Shared {
    fn ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Whether the next RoCEv2 frame is lost. It depends on its number alone.
    fn loses(&self) -> bool {
        let number = self.frames.fetch_add(1, Ordering::Relaxed);
        let mut draw = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        draw = (draw ^ (draw >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        draw ^= draw >> 31;
        draw % PER < u64::from(self.lost.load(Ordering::Relaxed))
    }

    /// Hands a frame that came by port `from` to the ports that it is for.
    fn forward(&self, from: usize, frame: &[u8]) {
        let Some(destination) = frame.first_chunk::<6>() else {
            return;
        };
        let group = destination[0] & 1 != 0;
        let roce = is_roce(frame);
        if roce && self.loses() {
            return;
        }
        for (number, port) in self.ports.iter().enumerate() {
            if number == from || !(group || port.mac == *destination) {
                continue;
            }
            if roce && port.steered.load(Ordering::Relaxed) {
                // It is lost if nobody is there.
                let _ = port.socket.send_to(frame, port.device);
            } else {
                port.write(frame);
            }
        }
    }

    /// Serves the network interface of a VM, whose QEMU connects, perhaps again and again.
    fn serve_vm(&self, from: usize, listener: &UnixListener) {
        let Some(port) = self.ports.get(from) else {
            return;
        };
        while !self.ended() {
            match listener.accept() {
                Ok((stream, _)) => {
                    if let Ok(reader) = port.connect(stream) {
                        self.read_frames(from, reader);
                    }
                    port.disconnect();
                }
                Err(_) => std::thread::sleep(LOOK),
            }
        }
    }

    /// Reads the frames of a QEMU, each after its length, until it goes.
    fn read_frames(&self, from: usize, mut reader: UnixStream) {
        let mut frame = vec![0; LONGEST];
        loop {
            let mut length = [0; 4];
            if self.read_exact(&mut reader, &mut length).is_none() {
                return;
            }
            let length = u32::from_be_bytes(length) as usize;
            let Some(space) = frame.get_mut(..length) else {
                return;
            };
            if self.read_exact(&mut reader, space).is_none() {
                return;
            }
            self.forward(from, space);
        }
    }

    fn read_exact(&self, reader: &mut UnixStream, mut space: &mut [u8]) -> Option<()> {
        while !space.is_empty() && !self.ended() {
            match reader.read(space) {
                Ok(0) => return None,
                Ok(read) => space = space.get_mut(read..)?,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
        space.is_empty().then_some(())
    }

    fn serve_device(&self, from: usize) {
        let Some(port) = self.ports.get(from) else {
            return;
        };
        let mut frame = vec![0; LONGEST];
        while !self.ended() {
            let Ok(length) = port.socket.recv(&mut frame) else {
                continue;
            };
            if let Some(frame) = frame.get(..length) {
                self.forward(from, frame);
            }
        }
    }
}

impl Port {
    fn stream(&self) -> std::sync::MutexGuard<'_, Option<UnixStream>> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// QEMU has connected. Returns where its frames are read.
    fn connect(&self, stream: UnixStream) -> std::io::Result<UnixStream> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(LOOK))?;
        stream.set_write_timeout(Some(STUCK))?;
        let reader = stream.try_clone()?;
        *self.stream() = Some(stream);
        Ok(reader)
    }

    fn disconnect(&self) {
        *self.stream() = None;
    }

    /// Writes a frame to the network interface. It is lost if nobody is there.
    fn write(&self, frame: &[u8]) {
        let mut stream = self.stream();
        let Some(open) = stream.as_mut() else {
            return;
        };
        let mut bytes = (frame.len() as u32).to_be_bytes().to_vec();
        bytes.extend_from_slice(frame);
        if open.write_all(&bytes).is_err() {
            // Perhaps a part was written: what follows would make no sense. QEMU connects again.
            let _ = open.shutdown(std::net::Shutdown::Both);
            *stream = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An Ethernet frame with an IPv4 header and a UDP port, as far as the switch looks at it.
    fn frame(to: [u8; 6], port: u16) -> Vec<u8> {
        let mut frame = vec![0; 60];
        frame[..6].copy_from_slice(&to);
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[23] = 17;
        frame[36..38].copy_from_slice(&port.to_be_bytes());
        frame
    }

    #[test]
    fn frames_for_rocev2_are_known() {
        let to = [2; 6];
        assert!(is_roce(&frame(to, ROCE)));
        assert!(!is_roce(&frame(to, ROCE + 1)));
        let mut tcp = frame(to, ROCE);
        tcp[23] = 6;
        assert!(!is_roce(&tcp));
        let mut ipv6 = vec![0; 80];
        ipv6[12..14].copy_from_slice(&[0x86, 0xdd]);
        ipv6[20] = 17;
        ipv6[56..58].copy_from_slice(&ROCE.to_be_bytes());
        assert!(is_roce(&ipv6));
        assert!(!is_roce(&ipv6[..50]));
        assert!(!is_roce(&[]));
    }

    #[test]
    fn mac_addresses_are_read() {
        assert_eq!(parse_mac(&mac(2)), Some([0x52, 0x54, 0, 0x12, 0x34, 2]));
        assert_eq!(parse_mac("52:54"), None);
    }
}
