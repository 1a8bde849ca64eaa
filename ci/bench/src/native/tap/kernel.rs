// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a TAP is opened (Linux `Documentation/networking/tuntap.rst`), which no crate here does with bursts
//! of UDP.
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use nix::libc;

/// A TAP of this name, which is gone when it is closed. It takes and gives frames behind a
/// `virtio_net_hdr` of 10 bytes, several UDP packets at once, and does not wait.
pub fn tap(name: &str) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")?;
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_flags: i16::try_from(flags).map_err(io::Error::other)?,
        },
    };
    // The last byte stays zero.
    let to = request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1);
    for (to, from) in to.zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    // SAFETY: it takes a pointer to this structure, which outlives the call.
    let made = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &mut request) };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // The kernel reads a whole word.
    let offload = libc::c_ulong::from(libc::TUN_F_CSUM | libc::TUN_F_USO4 | libc::TUN_F_USO6);
    // SAFETY: its argument is a number of that width.
    let set = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD as _, offload) };
    if set < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}
