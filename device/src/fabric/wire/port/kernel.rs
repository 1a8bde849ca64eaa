// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a port asks of the kernel that no crate here has: TAP interfaces (Linux
//! `Documentation/networking/tuntap.rst`) and programs at interfaces (bpf(2), tcx).
use std::ffi::{c_char, c_int, c_ulong, CStr};
use std::fs::{File, OpenOptions};
use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

/// Frames that a TAP holds until they are read, at most.
const QUEUE: c_int = 8192;
/// Longest name of an interface, with the zero behind it.
const NAME: usize = libc::IFNAMSIZ;

const TUNSETIFF: c_ulong = 0x4004_54ca;
const TUNSETPERSIST: c_ulong = 0x4004_54cb;
const TUNSETOWNER: c_ulong = 0x4004_54cc;
const TUNSETOFFLOAD: c_ulong = 0x4004_54d0;
/// We take frames whose checksums are not there yet, nobody looks at them, and several of UDP at once,
/// over IPv4 and IPv6 (Linux 6.2).
const TUN_F_CSUM: c_ulong = 1;
const TUN_F_USO: c_ulong = 0x20 | 0x40;
const BPF_PROG_LOAD: c_int = 5;
const BPF_OBJ_PIN: c_int = 6;
const BPF_LINK_CREATE: c_int = 28;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;

fn request(name: &str) -> io::Result<libc::ifreq> {
    let mut request = libc::ifreq {
        ifr_name: [0; NAME],
        ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags: 0 },
    };
    if name.len() >= NAME {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = c_char::from_ne_bytes([from]);
    }
    Ok(request)
}

fn ioctl(file: &impl AsRawFd, what: c_ulong, request: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: all calls that are used take a pointer to this structure, which outlives the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), what as _, request) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A TAP of this name, which is there or is made. One that was made is gone when it is closed, unless
/// it is kept. It reads and writes frames behind a header of 10 bytes (`virtio_net_hdr`) and does not
/// wait. `name` may have `%d` for a number. Returns its name, too.
pub(super) fn tap(name: &str) -> io::Result<(File, String)> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")?;
    let mut request = request(name)?;
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = i16::try_from(flags).unwrap_or_default();
    ioctl(&file, TUNSETIFF, &mut request)?;
    ioctl_number(&file, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_USO)
        .or_else(|_| ioctl_number(&file, TUNSETOFFLOAD, TUN_F_CSUM))?;
    let bytes = request.ifr_name.iter().take_while(|byte| **byte != 0);
    let bytes: Vec<u8> = bytes.flat_map(|byte| byte.to_ne_bytes()).collect();
    Ok((file, String::from_utf8_lossy(&bytes).into_owned()))
}

fn ioctl_number(file: &File, what: c_ulong, argument: c_ulong) -> io::Result<()> {
    // SAFETY: the argument of all calls that are used is a number.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), what as _, argument) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A TAP stays when it is closed, for a user to open.
pub(super) fn keep(tap: &File, owner: u32) -> io::Result<()> {
    ioctl_number(tap, TUNSETOWNER, owner.into())?;
    ioctl_number(tap, TUNSETPERSIST, 1)
}

/// A TAP that was kept goes when it is closed.
pub(super) fn keep_no_longer(tap: &File) -> io::Result<()> {
    ioctl_number(tap, TUNSETPERSIST, 0)
}

/// For calls about interfaces.
pub(super) fn any_socket() -> io::Result<UdpSocket> {
    UdpSocket::bind("127.0.0.1:0").or_else(|_| UdpSocket::bind("[::1]:0"))
}

/// The longest IP packet of an interface, bytes.
pub(super) fn mtu(name: &str) -> io::Result<usize> {
    mtu_by(&any_socket()?, name)
}

fn mtu_by(socket: &UdpSocket, name: &str) -> io::Result<usize> {
    let mut request = request(name)?;
    ioctl(socket, libc::SIOCGIFMTU as _, &mut request)?;
    // SAFETY: the call has written it, and any value is one.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    usize::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Whether an interface is up, with somebody at its other end, and its longest IP packet, bytes.
pub(super) fn state(socket: &UdpSocket, name: &str) -> io::Result<(bool, usize)> {
    let mut request = request(name)?;
    ioctl(socket, libc::SIOCGIFFLAGS as _, &mut request)?;
    // SAFETY: the call has written them, and any value is one.
    let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
    let up = libc::IFF_UP | libc::IFF_RUNNING;
    Ok((flags & up == up, mtu_by(socket, name)?))
}

/// Takes an interface up, with room for IP packets of `mtu` bytes.
pub(super) fn bring_up(name: &str, mtu: usize) -> io::Result<()> {
    let socket = any_socket()?;
    let mut request = request(name)?;
    request.ifr_ifru.ifru_mtu = c_int::try_from(mtu).unwrap_or(c_int::MAX);
    ioctl(&socket, libc::SIOCSIFMTU as _, &mut request)?;
    request.ifr_ifru.ifru_metric = QUEUE;
    ioctl(&socket, libc::SIOCSIFTXQLEN as _, &mut request)?;
    request.ifr_ifru.ifru_flags = 0;
    ioctl(&socket, libc::SIOCGIFFLAGS as _, &mut request)?;
    // SAFETY: the call has written them, and any value is one.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | i16::try_from(libc::IFF_UP).unwrap_or_default();
    ioctl(&socket, libc::SIOCSIFFLAGS as _, &mut request)
}

/// An instruction of a program (`struct bpf_insn`).
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Instruction {
    pub code: u8,
    /// Destination in the lower four bits, source in the upper.
    pub registers: u8,
    pub offset: i16,
    pub immediate: i32,
}

/// The beginning of `union bpf_attr` for BPF_PROG_LOAD; what follows is zero.
#[repr(C)]
struct Load {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel: u32,
    flags: u32,
}

/// The same for BPF_LINK_CREATE.
#[repr(C)]
struct Link {
    program: u32,
    interface: u32,
    kind: u32,
    flags: u32,
    /// Where in the order of programs: at the end.
    relative: u32,
    reserved: u32,
    revision: u64,
}

/// The same for BPF_OBJ_PIN.
#[repr(C)]
struct Pin {
    path: u64,
    what: u32,
    flags: u32,
}

/// Returns what the call returns, if it is no error.
fn bpf<T>(command: c_int, attributes: &T) -> io::Result<c_int> {
    // SAFETY: the kernel reads as many bytes of the structure as we say, and what its pointers
    // point to, which outlives the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attributes),
            size_of::<T>(),
        )
    };
    let result = c_int::try_from(result).unwrap_or(-1);
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

fn bpf_descriptor<T>(command: c_int, attributes: &T) -> io::Result<OwnedFd> {
    let fd = bpf(command, attributes)?;
    // SAFETY: the commands that are used return a descriptor of our own.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Has a program, or its place at an interface, stay as long as a file of this name is there, in a
/// file system of type bpf.
pub(super) fn pin(what: &OwnedFd, path: &CStr) -> io::Result<()> {
    let attributes = Pin {
        path: path.as_ptr() as u64,
        what: u32::try_from(what.as_raw_fd()).unwrap_or_default(),
        flags: 0,
    };
    bpf(BPF_OBJ_PIN, &attributes).map(drop)
}

/// Loads a program that looks at the frames of an interface.
pub(super) fn load(instructions: &[Instruction]) -> io::Result<OwnedFd> {
    let license = c"Dual BSD/GPL";
    let attributes = Load {
        kind: BPF_PROG_TYPE_SCHED_CLS,
        count: u32::try_from(instructions.len()).unwrap_or(u32::MAX),
        instructions: instructions.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel: 0,
        flags: 0,
    };
    bpf_descriptor(BPF_PROG_LOAD, &attributes)
}

/// Has a program look at the frames that leave the host by an interface, or at those that come.
/// It ends when what is returned is closed.
pub(super) fn attach(program: &OwnedFd, interface: u32, leaving: bool) -> io::Result<OwnedFd> {
    let attributes = Link {
        program: u32::try_from(program.as_raw_fd()).unwrap_or_default(),
        interface,
        kind: if leaving {
            BPF_TCX_EGRESS
        } else {
            BPF_TCX_INGRESS
        },
        flags: 0,
        relative: 0,
        reserved: 0,
        revision: 0,
    };
    bpf_descriptor(BPF_LINK_CREATE, &attributes)
}
