// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command line and the configuration file, and what follows from both.
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use nix::unistd::{Group, User};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::adapter::AdapterSettings;
use crate::engine::share::{ShareSettings, WorkerShare, MOST_WEIGHT, USUAL_WEIGHT};
use crate::engine::vm::{Congestion, Local, Segment, Uplink};
use crate::fabric::iwarp::port::{PortSettings, MOST_CONNECTIONS};
use crate::fabric::wire::layer::settings::{BadFaults, DeviceFaults, FaultSettings};
use crate::fabric::wire::path_mtu_within;
use crate::fabric::wire::port::interface::Interface;
use crate::fabric::wire::port::tap::{mtu_of, TapError};
use crate::fabric::wire::port::uplinks::Uplinks;
use crate::fabric::wire::port::vxlan::{self, inner_mtu, Directory, Entry, Tunnel, MAX_VNI};
use crate::fabric::wire::port::watch::Watch;
use crate::limits::{memory_of_each, Limits, MAX_COMPLETION_QUEUES, MAX_WORKERS};
use crate::logging::LogFormat;
use crate::rnic::RnicSettings;
use crate::sandbox::{self, Identity, Mode};
use crate::socket::{self, Access};
use crate::verbs::gid_policy::{self, GidPolicy, Gids, MAX_VLAN};

/// Worker threads where nothing else is asked for, at most.
const MAX_DEFAULT_WORKERS: usize = 4;
/// File descriptors of the process that are enough without VMs, and more for each VM: two for each
/// of 64 virtqueues, one for each of 509 memory regions, and what a session takes.
const DESCRIPTORS: u64 = 256;
const DESCRIPTORS_EACH: u64 = 1024;
/// Devices that may come later without a new start, if there may be as many file descriptors.
const LATER_DEVICES: u64 = 64;
/// Least MTU of a network between hosts, bytes, and the usual one.
const LEAST_MTU: usize = 576;
const USUAL_MTU: usize = 1500;
const MOST_MTU: usize = 9216;
/// Longest time for which a worker may poll before it sleeps.
const MAX_POLL: Duration = Duration::from_secs(10);
/// How long the process lets work requests complete before it ends, where nothing else is asked for,
/// and the longest time.
const USUAL_DRAIN: Duration = Duration::from_secs(2);
const MAX_DRAIN: Duration = Duration::from_secs(3600);

/// Why the configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The file is not a configuration.
    #[error("{path} is not a valid configuration")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// There is nothing to serve.
    #[error(
        "no socket to serve: give --socket-path, --vfio-user-path, or a [[device]] in the file \
         of --config, or --status-socket to add one later"
    )]
    NoDevice,
    /// A socket is named twice.
    #[error("socket {0} is given twice")]
    Twice(PathBuf),
    /// The number of workers is out of range.
    #[error("{0} workers: there must be 1 to {MAX_WORKERS}")]
    Workers(u16),
    /// The number of completion-event queues is out of range.
    #[error("{queues} completion queues for {socket}: there must be 1 to {MAX_COMPLETION_QUEUES}")]
    CompletionQueues {
        /// The socket.
        socket: PathBuf,
        /// Asked for.
        queues: u16,
    },
    /// The polling time is too long.
    #[error("polling for {0:?}: at most {MAX_POLL:?} are sensible")]
    Poll(Duration),
    /// The time before the end is none, or too long.
    #[error("{0} seconds before the process ends: there must be 0 to {max}", max = MAX_DRAIN.as_secs())]
    Drain(f64),
    /// A MAC address is not one.
    #[error("'{0}' is not the MAC address of a network interface (six octets such as 52:54:00:12:34:56)")]
    Mac(String),
    /// A part of `--socket-path` is not understood.
    #[error(
        "'{0}' is not an option of a socket (mac=, network=, completion-queues=, gids=, address=, \
         vlan=, weight=, bytes-per-second=, messages-per-second=, footprint=, memory=, vni=, netdev= \
         or front-end=)"
    )]
    SocketOption(String),
    /// A policy for GIDs is not one.
    #[error("'{0}' is not a policy for GIDs (any or mac)")]
    Gids(String),
    /// The policy `mac` without a MAC address.
    #[error("{0} has gids=mac and no MAC address: give mac= as well")]
    NoMac(PathBuf),
    /// VLANs are listed, and nothing is made of them.
    #[error("{0} has a list of VLANs, which means nothing without gids=mac")]
    VlansWithoutPolicy(PathBuf),
    /// An address is not one that a VM can have.
    #[error("'{0}' is not the IP address of a network interface (such as 10.0.0.1 or fd00::1)")]
    Address(String),
    /// A VLAN id is not one.
    #[error("'{0}' is not a VLAN id (0 to {MAX_VLAN})")]
    Vlan(String),
    /// A number in `--socket-path` is not one.
    #[error("'{0}' is not a number that a device can have there")]
    Number(String),
    /// A protocol in `--socket-path` is not one.
    #[error("'{0}' is not what VMMs speak (vhost-user or vfio-user)")]
    FrontEnd(String),
    /// A weight is out of range.
    #[error("the weight {weight} of {socket}: there must be 1 to {MOST_WEIGHT}")]
    Weight {
        /// The socket.
        socket: PathBuf,
        /// Asked for.
        weight: u16,
    },
    /// A limit in `--socket-path` is not one.
    #[error("'{0}' is not a number of bytes")]
    Bytes(String),
    /// Permissions are not what chmod takes.
    #[error("'{0}' are no permissions of a socket (an octal number such as 0660)")]
    Mode(String),
    /// There is no such user or group.
    #[error("there is no {kind} '{name}'")]
    Nobody {
        /// What it is to be.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// A way out for a VM of a process without one.
    #[error("{0} has a vni, but the file has no [wire]")]
    NoWire(PathBuf),
    /// A network identifier is out of range.
    #[error("the vni {vni} of {socket}: there must be 1 to {MAX_VNI}")]
    Vni {
        /// The socket.
        socket: PathBuf,
        /// Asked for.
        vni: u32,
    },
    /// A VM has two ways out.
    #[error("{0} has more than one of vni, dgram and netdev: there is one way out")]
    TwoWays(PathBuf),
    /// The interface of the host is not there.
    #[error("{0} has netdev {1}, but the host has no such interface")]
    NoNetdev(PathBuf, String),
    /// Where messages have no way out, they can only stay.
    #[error("{0} has {1}, but no way out that this is about: no vni, dgram or netdev")]
    NotOutside(PathBuf, &'static str),
    /// A device has faults, and no way out of this process.
    #[error("{0} has faults, but only frames have them: it needs a vni, dgram or netdev")]
    NoFrames(PathBuf),
    /// A device has faults, and no address by which its frames could be told from others.
    #[error("{0} has faults and no MAC address, whose frames have them: give it its mac as well")]
    FaultsWithoutMac(PathBuf),
    /// What a device has for faults makes no sense.
    #[error("the faults of {0}: {1}")]
    Faults(PathBuf, BadFaults),
    /// An RNIC of iWARP needs an address, and another one has none of it.
    #[error("{0}: transport = \"iwarp\" and [device.iwarp] with an address belong together")]
    Iwarp(PathBuf),
    /// Connections of iWARP are the only way out that it has.
    #[error("{0} has transport = \"iwarp\": that goes with no vni, dgram or netdev")]
    IwarpAndFrames(PathBuf),
    /// The address of a port of iWARP is none.
    #[error("{0} has the address {1}, which is none of a host")]
    IwarpAddress(PathBuf, IpAddr),
    /// Two VMs would listen at the same ports.
    #[error(
        "{0} has the address {1}, which another device of iWARP has: each needs one of its own"
    )]
    IwarpTwice(String, IpAddr),
    /// It takes what is opened when the process starts.
    #[error("{0}: a device has {1} from the start of the process, or not at all")]
    Late(PathBuf, &'static str),
    /// Two networks are the same one on the wire.
    #[error("vni {0} is given to two networks")]
    TwoNetworks(u32),
    /// The address of a host is not one.
    #[error("'{0}' is not the address of a host (such as 192.0.2.1 or [2001:db8::1]:4789)")]
    Host(String),
    /// What is at a host is no range of addresses.
    #[error("'{0}' is not a range of IP addresses (such as 10.0.0.0/24 or fd00::/64)")]
    Range(String),
    /// The MTU of the network between hosts is out of range.
    #[error("an mtu of {0} between hosts: there must be {LEAST_MTU} to {MOST_MTU}")]
    WireMtu(usize),
    /// `--socket-path` names no path.
    #[error("a socket needs a path")]
    NoPath,
}

/// An RDMA NIC for virtual machines, on the host side of vhost-user or vfio-user.
///
/// One process serves any number of VMs, each on a socket of its own. VMs on the same network reach
/// each other.
#[derive(Debug, Parser)]
#[command(
    name = "vhost-device-rdma",
    version,
    args_conflicts_with_subcommands = true
)]
#[command(after_help = "The log goes to standard error; RUST_LOG=debug shows more of it.")]
pub struct Args {
    /// What to do instead of serving.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// What to serve.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// What to do instead of serving.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print the objects, counters and state of all VMs of a running process, as JSON.
    Status {
        /// The socket that the process was given as --status-socket.
        path: PathBuf,
        /// Print it for people: indented.
        #[arg(long)]
        pretty: bool,
    },
    /// Prepare an interface of the host, so that a process that starts without privileges can have it
    /// as the `netdev` of a device.
    ///
    /// A TAP of the user is joined to it, and stays until `--remove`, also when no process uses it: what
    /// comes for RDMA is lost then. It takes root, and Linux 6.6.
    WireSetup {
        /// The interface.
        netdev: String,
        /// The user of the process, a name or a number.
        #[arg(long)]
        user: Option<String>,
        /// Where programs are pinned: a file system of type bpf.
        #[arg(long, value_name = "DIRECTORY", default_value = "/sys/fs/bpf")]
        pins: PathBuf,
        /// Take back what was prepared.
        #[arg(long, conflicts_with = "user")]
        remove: bool,
    },
    /// Take the link of a device of a running process down, or up again.
    ///
    /// While it is down, RDMA messages from and to the VM find no answer, like with a cable that is
    /// pulled, and its driver reports the port as down. The VM need not be attached; it finds the
    /// link as it was left.
    Link {
        /// The socket that the process was given as --status-socket.
        #[arg(value_name = "STATUS-SOCKET")]
        path: PathBuf,
        /// The device: its socket as `status` names it, or its MAC address.
        device: String,
        /// What the link is to be.
        state: LinkState,
    },
    /// Have frames of a device of a running process lost, damaged, repeated, reordered or delayed,
    /// to test how software takes it.
    ///
    /// The frames are those of RDMA messages between processes. What happens to one depends on the
    /// seed and its number alone, the first one having 0: what was seen once can be had again.
    Faults {
        /// The socket that the process was given as --status-socket.
        #[arg(value_name = "STATUS-SOCKET")]
        path: PathBuf,
        /// The device: its socket as `status` names it, or its MAC address.
        device: String,
        /// Parts with commas between them, as in seed=7,loss=1%,delay=2ms..5ms; or off.
        ///
        /// seed=N. loss=PART: 0.01 or 1%. burst=N: frames that are lost one after the other, in the
        /// mean. damage=PART: one bit. duplicate=PART and reorder=PART: comes twice, or later than
        /// others, by at most reorder-time=TIME [default: 1ms]. delay=TIME or TIME..TIME. rate=BITS
        /// in a second, with at most queue=BYTES waiting [default: 262144]. mark=PART, or
        /// mark-from=BYTES that wait: a router says that it is congested (ECN). lose=N or N..N:
        /// these frames. frames=N..N: all of it to these frames alone. path=N: to reliable datagrams
        /// (SRD) on this path alone, 0 to 7. In numbers, k, M and G are powers of 1000.
        #[arg(verbatim_doc_comment)]
        faults: FaultsOrOff,
        /// Only what the VM sends, or only what comes for it.
        #[arg(long, value_enum)]
        direction: Option<FaultDirection>,
    },
    /// Put a queue pair or a completion queue of a VM in error, to test how software takes it.
    ///
    /// A queue pair goes to the error state with IBV_EVENT_QP_FATAL. A completion queue is as after an
    /// overflow: IBV_EVENT_CQ_ERR, and its queue pairs go to the error state.
    Fail {
        /// The socket that the process was given as --status-socket.
        #[arg(value_name = "STATUS-SOCKET")]
        path: PathBuf,
        /// The device: its socket as `status` names it, or its MAC address.
        device: String,
        /// What is to fail.
        what: Object,
        /// Its number, as `status` has it.
        number: u32,
    },
    /// Print the devices of a running process, with a VM or without.
    List {
        /// The socket that the process was given as --status-socket.
        #[arg(value_name = "STATUS-SOCKET")]
        path: PathBuf,
        /// Print them as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print the limits of the devices of a running process, or change those of one.
    ///
    /// What the VM may have of the workers changes at once, and the VM stays connected. Other limits
    /// are those of the configuration: with `reload`, the VM is disconnected for a moment. Changing is
    /// for root and the user that started the process, and lasts until `reload` or the next start.
    Limits {
        /// The socket that the process was given as --status-socket.
        #[arg(value_name = "STATUS-SOCKET")]
        path: PathBuf,
        /// This one alone: its socket as `list` names it, or its MAC address.
        device: Option<String>,
        /// Print them as JSON.
        #[arg(long)]
        json: bool,
        /// What the limits are to be.
        #[command(flatten)]
        change: LimitsArgs,
    },
    /// Print what was counted of the VMs of a running process since each was attached.
    Counters {
        /// The socket that the process was given as --status-socket.
        #[arg(value_name = "STATUS-SOCKET")]
        path: PathBuf,
        /// This one alone: the socket of its device as `list` names it, or its MAC address.
        device: Option<String>,
        /// Print it as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show what VMs, workers and queue pairs of a running process do, until it is stopped.
    Top {
        /// The socket that the process was given as --status-socket.
        #[arg(value_name = "STATUS-SOCKET")]
        path: PathBuf,
        /// Seconds from one look to the next.
        #[arg(long, value_name = "SECONDS", default_value = "1")]
        interval: f64,
        /// Look so many times [default: until it is stopped].
        #[arg(long, value_name = "N")]
        times: Option<u64>,
        /// Show so many queue pairs at most, the busiest.
        #[arg(long, value_name = "N", default_value_t = 10)]
        queue_pairs: usize,
    },
    /// Look at this host, and say what it lacks for VMs with the device, and what to do.
    ///
    /// Exits with 1 if something does not work.
    Check {
        /// Look at the process, too, that was given this as --status-socket.
        #[arg(long, value_name = "PATH")]
        status_socket: Option<PathBuf>,
        /// Look at what `lspci -nnk` said in a guest, too.
        #[arg(long, value_name = "FILE")]
        lspci: Option<PathBuf>,
    },
    /// Have a running process serve one more device.
    ///
    /// This is for root and the user that started the process. The socket is bound by this command,
    /// and stays when the process ends.
    Add {
        /// The socket that the process was given as --status-socket.
        #[arg(value_name = "STATUS-SOCKET")]
        path: PathBuf,
        /// The device, as with --socket-path; with front-end=vfio-user, as with --vfio-user-path.
        #[arg(value_name = "PATH[,mac=MAC][,...]")]
        device: String,
        /// Permissions of the socket, octal, such as 0660 [default: what the umask leaves].
        #[arg(long, value_name = "MODE")]
        socket_mode: Option<String>,
        /// Owner of the socket, a name or a number [default: you].
        #[arg(long, value_name = "USER")]
        socket_owner: Option<String>,
        /// Group of the socket, a name or a number [default: yours].
        #[arg(long, value_name = "GROUP")]
        socket_group: Option<String>,
    },
    /// Have a running process serve a device no longer: its VM loses it, and its socket is removed,
    /// unless a service manager has bound that.
    ///
    /// This is for root and the user that started the process.
    Remove {
        /// The socket that the process was given as --status-socket.
        #[arg(value_name = "STATUS-SOCKET")]
        path: PathBuf,
        /// The device: its socket as `list` names it, or its MAC address.
        device: String,
    },
    /// Have a running process serve the devices of a configuration file, and no others.
    ///
    /// Devices that are to be as they are, and their VMs, are left alone. A device that is to be
    /// another than before loses its VM, which finds it changed when it comes back, unless all that
    /// changes is what it has of the workers: its weight, and bytes and messages per second. What the file
    /// says of the process itself, as workers or its network between hosts, takes a new start. This
    /// is for root and the user that started the process.
    Reload {
        /// The socket that the process was given as --status-socket.
        #[arg(value_name = "STATUS-SOCKET")]
        path: PathBuf,
        /// The file.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Do what a file says to devices of a running process, step by step: faults, links, queues in
    /// error.
    Play {
        /// The socket that the process was given as --status-socket.
        #[arg(value_name = "STATUS-SOCKET")]
        path: PathBuf,
        /// The file, in TOML: for each step `[[step]]` with `at` (a time from the start, as '2s', or a
        /// frame, as 'frame 5000', which waits until the step is done), `device`, and one of `faults`,
        /// `link`, `qp` and `cq`; `direction` says which faults, and which frames are counted.
        file: PathBuf,
    },
    /// Write what a running process sends and receives over the wire, and what VMs of it send each
    /// other, to standard output, for Wireshark, until it is stopped.
    ///
    /// Each frame that came has a comment with what the device made of it: why it was dropped or
    /// answered by a NAK, or that it came before. What stays in the process is shown as the packets
    /// that it would have been. As in: vhost-device-rdma capture STATUS-SOCKET | wireshark -k -i -
    Capture {
        /// The socket that the process was given as --status-socket.
        #[arg(value_name = "STATUS-SOCKET")]
        path: PathBuf,
        /// Only frames from and to the VM of this device: its socket as `status` names it, or its
        /// MAC address.
        #[arg(long)]
        vm: Option<String>,
        /// At most so many bytes of each frame.
        #[arg(long, default_value_t = 65_535)]
        snap: usize,
    },
}

/// What the limits of a device are to be.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct LimitsArgs {
    /// VMs that all have work share a worker in proportion to it, 1 to 10000.
    #[arg(long, value_name = "N", requires = "device")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u16>,
    /// Bytes that the VM may send, or read from others, per second; 0: no limit.
    #[arg(long, value_name = "N", requires = "device")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// Messages that the VM may send per second; 0: no limit.
    #[arg(long, value_name = "N", requires = "device")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages_per_second: Option<u64>,
}

impl LimitsArgs {
    /// A device with these limits, and its others.
    pub(crate) fn of(&self, device: &DeviceConfig) -> DeviceConfig {
        let rate = |new: Option<u64>, old| new.map_or(old, NonZeroU64::new);
        DeviceConfig {
            weight: self.weight.or(device.weight),
            bytes_per_second: rate(self.bytes_per_second, device.bytes_per_second),
            messages_per_second: rate(self.messages_per_second, device.messages_per_second),
            ..device.clone()
        }
    }
}

/// An object that can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Object {
    /// A queue pair.
    Qp,
    /// A completion queue.
    Cq,
}

/// What frames have faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FaultDirection {
    /// What the VM sends.
    Out,
    /// What comes for it.
    In,
}

/// Faults, or the word `off`.
#[derive(Debug, Clone, PartialEq)]
pub struct FaultsOrOff(pub Option<Box<FaultSettings>>);

impl FromStr for FaultsOrOff {
    type Err = BadFaults;

    fn from_str(text: &str) -> Result<Self, BadFaults> {
        if text == "off" {
            return Ok(Self(None));
        }
        text.parse().map(|faults| Self(Some(Box::new(faults))))
    }
}

/// What a link is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LinkState {
    /// Messages get through.
    Up,
    /// Nothing gets through.
    Down,
}

/// What to serve.
#[derive(Debug, Default, clap::Args)]
pub struct ServeArgs {
    /// Serve a VM on this socket; may be repeated.
    ///
    /// mac: address of the VM's network interface that belongs to the RNIC (GIDs and rdma_cm need
    /// it). network: VMs on the same network reach each other [default: default].
    /// completion-queues: interrupts for completions; one for each vCPU is best [default: 4].
    /// gids: which GIDs the VM may have. any: all but those of other devices. mac: the link-local
    /// one of its MAC address and each address=, with that MAC address as the source, in no VLAN
    /// but each vlan= [default: any]. address: an IP address that no other VM may have; may be
    /// repeated. vlan: a VLAN id, with gids=mac; may be repeated. weight: VMs that all have work
    /// share a worker in proportion to it, 1 to 10000 [default: 100]. bytes-per-second and
    /// messages-per-second: what the VM may send, or read from others [default: no limit].
    /// footprint: bytes that the VM may make this process keep [default: 64 MiB and an eighth of its
    /// memory, less for large ones]. memory: bytes that the VM may have [default: 16 TiB, less with
    /// more than four sockets]. vni: what its network is called between hosts, with a wire in the
    /// file. netdev: the interface of the host that the VM's is. front-end: what its VMM speaks
    /// [default: vhost-user].
    #[arg(
        long,
        value_name = "PATH[,mac=MAC][,network=NAME][,completion-queues=N][,gids=any|mac]\
                      [,address=IP]...[,vlan=ID]...[,weight=N][,bytes-per-second=N]\
                      [,messages-per-second=N][,footprint=BYTES][,memory=BYTES]\
                      [,vni=N][,netdev=NAME][,front-end=vhost-user|vfio-user]",
        verbatim_doc_comment
    )]
    pub socket_path: Vec<DeviceConfig>,
    /// Serve a VM on this socket by vfio-user, for a stock QEMU from 10.1 on; may be repeated. The
    /// options are those of --socket-path.
    #[arg(
        long,
        value_name = "PATH[,mac=MAC][,...]",
        value_parser = vfio_user_device,
        verbatim_doc_comment
    )]
    pub vfio_user_path: Vec<DeviceConfig>,
    /// Read settings and devices from this TOML file; the command line has priority.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Worker threads that move data, 1 to 8 [default: half of the CPUs, at most 4].
    #[arg(long, value_name = "N")]
    pub workers: Option<u16>,
    /// How long an idle worker polls before it sleeps, microseconds [default: 50].
    #[arg(long, value_name = "N")]
    pub poll_us: Option<u64>,
    /// Let work requests that are posted complete when the process is told to end, for so long at most;
    /// 0: end at once [default: 2].
    #[arg(long, value_name = "SECONDS")]
    pub drain: Option<f64>,
    /// Give the status as JSON to everyone who may connect to this socket, and have them take links
    /// down and up, lose frames, and put queues in error.
    #[arg(long, value_name = "PATH")]
    pub status_socket: Option<PathBuf>,
    /// Tell metrics at this socket, or at this port of the loopback interface, by HTTP at /metrics.
    #[arg(long, value_name = "PATH|ADDRESS:PORT")]
    pub metrics: Option<socket::Address>,
    /// The form of the log: text, or JSON with one object in each line [default: text].
    #[arg(
        long,
        value_enum,
        value_name = "text|json",
        hide_possible_values = true
    )]
    pub log_format: Option<LogFormat>,
    /// Permissions of all sockets, octal, such as 0660 [default: what the umask leaves].
    #[arg(long, value_name = "MODE")]
    pub socket_mode: Option<String>,
    /// Owner of all sockets, a name or a number [default: the user of the process].
    #[arg(long, value_name = "USER")]
    pub socket_owner: Option<String>,
    /// Group of all sockets, a name or a number [default: the group of the process].
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,
    /// Become this user when the sockets are there, a name or a number [default: if started as
    /// root, vhost-device-rdma if there is such a user, else 65534].
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,
    /// Give up what is not needed: privileges, files, system calls. log: system calls that should
    /// not be needed are logged by the kernel, and carried out [default: on].
    #[arg(
        long,
        value_enum,
        value_name = "on|log|off",
        hide_possible_values = true
    )]
    pub sandbox: Option<Mode>,
}

/// One VM to serve.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DeviceConfig {
    /// Its socket.
    pub socket: PathBuf,
    /// What its VMM speaks there.
    #[serde(default, alias = "front_end")]
    pub front_end: FrontEnd,
    /// MAC address of the network interface that is paired with the RNIC.
    pub mac: Option<Mac>,
    /// The network it is on.
    pub network: Option<String>,
    /// Completion-event queues.
    #[serde(alias = "completion_queues")]
    pub completion_queues: Option<u16>,
    /// Which GIDs its VM may have.
    #[serde(default)]
    pub gids: Gids,
    /// IP addresses that are GIDs of its VM alone.
    #[serde(default)]
    pub addresses: Vec<Address>,
    /// VLANs that its VM may be in.
    #[serde(default)]
    pub vlans: Vec<Vlan>,
    /// Its part of a worker beside other VMs with work.
    pub weight: Option<u16>,
    /// Bytes that its VM may send, or read from others, per second.
    #[serde(alias = "bytes_per_second")]
    pub bytes_per_second: Option<NonZeroU64>,
    /// Messages that its VM may send per second.
    #[serde(alias = "messages_per_second")]
    pub messages_per_second: Option<NonZeroU64>,
    /// What its VM may make this process keep, bytes; otherwise as `[limits]` says.
    pub footprint: Option<u64>,
    /// Memory that its VM may have, bytes; otherwise as `[limits]` says.
    pub memory: Option<u64>,
    /// What its network is called between hosts.
    pub vni: Option<u32>,
    /// Its own interface. Without this and `vni`, no message leaves this process.
    pub dgram: Option<DgramConfig>,
    /// The interface of the host that its VM's network interface is, where its frames go, too;
    /// instead of `vni`.
    pub netdev: Option<String>,
    /// Which messages do not take the way out.
    #[serde(default, deserialize_with = "local")]
    pub local: Option<Local>,
    /// How its senders go by the state of the network.
    pub congestion: Option<Congestion>,
    /// Faults of its frames.
    pub faults: Option<FaultsConfig>,
    /// What its RNIC is.
    #[serde(default)]
    pub transport: Transport,
    /// Where its connections are from, if it is one of iWARP.
    pub iwarp: Option<IwarpConfig>,
}

/// What a VMM speaks at the socket of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FrontEnd {
    /// vhost-user: the VMM has a virtio device of its own, and the process its virtqueues.
    #[default]
    VhostUser,
    /// vfio-user: the process has the whole PCI device.
    VfioUser,
}

fn vfio_user_device(text: &str) -> Result<DeviceConfig, Error> {
    let front_end = FrontEnd::VfioUser;
    text.parse().map(|device| DeviceConfig {
        front_end,
        ..device
    })
}

/// What an RNIC is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// One of RoCE.
    #[default]
    Roce,
    /// One of iWARP.
    Iwarp,
}

/// Connections of an RNIC of iWARP.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct IwarpConfig {
    /// The address of this host that its connections are from, and at which it listens.
    pub address: IpAddr,
    /// Addresses of VMs, and those of hosts that stand for them.
    #[serde(default)]
    pub directory: HashMap<IpAddr, IpAddr>,
    /// Others to which the VM may connect.
    #[serde(default)]
    pub peers: Vec<Range>,
    /// Whether it asks for a CRC of all that is sent.
    pub crc: Option<bool>,
    /// Whether it offers that either end of a connection sends first.
    #[serde(default)]
    pub peer_to_peer: bool,
}

impl IwarpConfig {
    fn settings(self) -> PortSettings {
        PortSettings {
            address: self.address,
            directory: self.directory,
            peers: self
                .peers
                .into_iter()
                .map(|of| (of.address, of.bits))
                .collect(),
            crc: self.crc.unwrap_or(true),
            peer_to_peer: self.peer_to_peer,
        }
    }
}

/// `true`, `false`, or "nothing".
fn local<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Local>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "local is true, false, or \"nothing\"")]
    enum Said {
        Process(bool),
        Less(Less),
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Less {
        Nothing,
    }
    Ok(Some(match Said::deserialize(deserializer)? {
        Said::Process(true) => Local::Process,
        Said::Process(false) => Local::Vm,
        Said::Less(Less::Nothing) => Local::Nothing,
    }))
}

impl FromStr for DeviceConfig {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let mut parts = text.split(',');
        let socket = parts
            .next()
            .filter(|path| !path.is_empty())
            .ok_or(Error::NoPath)?;
        let mut device = Self {
            socket: socket.into(),
            front_end: FrontEnd::default(),
            mac: None,
            network: None,
            completion_queues: None,
            gids: Gids::default(),
            addresses: Vec::new(),
            vlans: Vec::new(),
            weight: None,
            bytes_per_second: None,
            messages_per_second: None,
            footprint: None,
            memory: None,
            vni: None,
            dgram: None,
            netdev: None,
            local: None,
            congestion: None,
            faults: None,
            transport: Transport::default(),
            iwarp: None,
        };
        let bytes = |n: &str| {
            let bytes = n.parse::<u64>();
            bytes.map(Some).map_err(|_| Error::Bytes(n.to_owned()))
        };
        fn number<T: FromStr>(text: &str) -> Result<T, Error> {
            text.parse().map_err(|_| Error::Number(text.to_owned()))
        }
        for part in parts {
            match part.split_once('=') {
                Some(("mac", mac)) => device.mac = Some(mac.parse()?),
                Some(("network", name)) => device.network = Some(name.to_owned()),
                Some(("completion-queues", n)) => {
                    device.completion_queues = Some(number(n)?);
                }
                Some(("gids", "any")) => device.gids = Gids::Any,
                Some(("gids", "mac")) => device.gids = Gids::Mac,
                Some(("gids", other)) => return Err(Error::Gids(other.to_owned())),
                Some(("address", address)) => device.addresses.push(address.parse()?),
                Some(("vlan", id)) => device.vlans.push(id.parse()?),
                Some(("weight", n)) => device.weight = Some(number(n)?),
                Some(("bytes-per-second", n)) => device.bytes_per_second = Some(number(n)?),
                Some(("messages-per-second", n)) => device.messages_per_second = Some(number(n)?),
                Some(("vni", n)) => device.vni = Some(number(n)?),
                Some(("netdev", name)) => device.netdev = Some(name.to_owned()),
                Some(("front-end", "vhost-user")) => device.front_end = FrontEnd::VhostUser,
                Some(("front-end", "vfio-user")) => device.front_end = FrontEnd::VfioUser,
                Some(("front-end", other)) => return Err(Error::FrontEnd(other.to_owned())),
                Some(("footprint", n)) => device.footprint = bytes(n)?,
                Some(("memory", n)) => device.memory = bytes(n)?,
                _ => return Err(Error::SocketOption(part.to_owned())),
            }
        }
        Ok(device)
    }
}

/// The MAC address of a network interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Mac(pub [u8; 6]);

impl FromStr for Mac {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || Error::Mac(text.to_owned());
        let mut mac = [0; 6];
        let mut octets = text.split(':');
        for octet in &mut mac {
            let digits = octets
                .next()
                .filter(|d| d.len() == 2 && d.bytes().all(|b| b.is_ascii_hexdigit()));
            *octet = u8::from_str_radix(digits.ok_or_else(bad)?, 16).map_err(|_| bad())?;
        }
        // A multicast address belongs to no interface, and all zero means that none is named.
        if octets.next().is_some() || mac[0] & 1 != 0 || mac == [0; 6] {
            return Err(bad());
        }
        Ok(Self(mac))
    }
}

impl TryFrom<String> for Mac {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

/// The IP address of a network interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Address(pub IpAddr);

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let address = text.parse::<IpAddr>().ok();
        // No interface has these, and as a GID the first one would clear an entry.
        let good = address.filter(|address| {
            let address = address.to_canonical();
            !address.is_unspecified() && !address.is_multicast()
        });
        good.map(Self)
            .ok_or_else(|| Error::Address(text.to_owned()))
    }
}

impl TryFrom<String> for Address {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

/// The id of a VLAN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u16")]
pub struct Vlan(pub u16);

impl FromStr for Vlan {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let id = text.parse::<u16>();
        let id = id.map_err(|_| Error::Vlan(text.to_owned()))?;
        id.try_into()
    }
}

impl TryFrom<u16> for Vlan {
    type Error = Error;

    fn try_from(id: u16) -> Result<Self, Error> {
        let good = (id <= MAX_VLAN).then_some(Self(id));
        good.ok_or_else(|| Error::Vlan(id.to_string()))
    }
}

/// The address of a host, with a UDP port if that is not VXLAN's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Host(pub SocketAddr);

impl TryFrom<String> for Host {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        let alone = text
            .parse()
            .map(|ip: IpAddr| SocketAddr::new(ip, vxlan::PORT));
        let address = alone.or_else(|_| text.parse());
        let good = address.ok().filter(|address: &SocketAddr| {
            let ip = address.ip();
            !ip.is_unspecified() && !ip.is_multicast() && address.port() != 0
        });
        good.map(Self).ok_or(Error::Host(text))
    }
}

/// A range of IP addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Range {
    /// The first one.
    address: IpAddr,
    /// Bits that all have in common.
    bits: u8,
}

impl TryFrom<String> for Range {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        let parse = || {
            let (address, bits) = match text.split_once('/') {
                Some((address, bits)) => (address, Some(bits)),
                None => (text.as_str(), None),
            };
            let address: IpAddr = address.parse().ok()?;
            let most = if address.is_ipv4() { 32 } else { 128 };
            let bits = bits.map_or(Some(most), |bits| bits.parse().ok())?;
            (bits <= most).then_some(Self { address, bits })
        };
        parse().ok_or(Error::Range(text))
    }
}

impl Range {
    /// The same as GIDs, which are at a host.
    fn at(self, host: SocketAddr) -> Entry {
        let before = if self.address.is_ipv4() { 96 } else { 0 };
        Entry {
            prefix: gid_policy::of_address(self.address),
            bits: before + self.bits,
            host,
        }
    }
}

/// The network between hosts.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct WireConfig {
    /// This host's address in it.
    pub address: Host,
    /// The longest IP packet in it, bytes.
    pub mtu: Option<usize>,
    /// The hosts, this one perhaps among them.
    #[serde(default)]
    pub host: Vec<HostConfig>,
}

/// A host.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct HostConfig {
    /// Its address.
    pub address: Host,
    /// The addresses of the VMs that it has.
    pub gids: Vec<Range>,
}

/// An interface of a VM: its frames are UDP datagrams between two addresses, as with QEMU's
/// `-netdev dgram`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DgramConfig {
    /// Where this process receives them.
    pub local: SocketAddr,
    /// Where the switch does.
    pub remote: SocketAddr,
    /// The longest IP packet, bytes.
    pub mtu: Option<usize>,
}

impl DgramConfig {
    /// The way that the VM of interface `number` has.
    fn uplink(&self, number: u32) -> Result<Uplink, Error> {
        Ok(Uplink {
            local: Local::default(),
            congestion: Congestion::default(),
            segment: Segment::Own(number),
            active_mtu: path_mtu_within(mtu_or_usual(self.mtu)?),
        })
    }
}

/// Faults of a device: the same in both directions, or for each its own.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum FaultsConfig {
    /// In both.
    Both(String),
    /// In one, or in each others.
    Each(EachWay),
}

/// Faults by direction.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EachWay {
    /// Of what the VM sends.
    pub out: Option<String>,
    /// Of what comes for it.
    #[serde(rename = "in")]
    pub inbound: Option<String>,
}

impl FaultsConfig {
    fn settings(&self) -> Result<DeviceFaults, BadFaults> {
        let read = |text: &String| text.parse::<FaultSettings>();
        match self {
            Self::Both(text) => read(text).map(|faults| DeviceFaults {
                sent: Some(faults),
                received: Some(faults),
            }),
            Self::Each(EachWay { out, inbound }) => Ok(DeviceFaults {
                sent: out.as_ref().map(read).transpose()?,
                received: inbound.as_ref().map(read).transpose()?,
            }),
        }
    }
}

fn mtu_or_usual(mtu: Option<usize>) -> Result<usize, Error> {
    let mtu = mtu.unwrap_or(USUAL_MTU);
    let good = (LEAST_MTU..=MOST_MTU).contains(&mtu);
    good.then_some(mtu).ok_or(Error::WireMtu(mtu))
}

/// All ways out of this process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UplinksConfig {
    /// The network between hosts.
    pub wire: Option<Wire>,
    /// Interfaces of VMs, by their numbers.
    pub interfaces: Vec<InterfaceConfig>,
}

/// An interface of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InterfaceConfig {
    /// Frames are UDP datagrams.
    Dgram(DgramConfig),
    /// The interface of the host that the VM's is.
    Netdev(String),
}

/// A way out of this process cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenUplink {
    /// The network between hosts.
    #[error("cannot open the address of [wire]")]
    Wire(#[source] std::io::Error),
    /// An interface.
    #[error("cannot open dgram at {0}")]
    Dgram(SocketAddr, #[source] std::io::Error),
    /// An interface of the host.
    #[error("cannot use netdev {0}")]
    Netdev(String, #[source] TapError),
}

impl UplinksConfig {
    /// Watches those that are interfaces of the host, if there are any.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn watch(&self) -> std::io::Result<Option<Watch>> {
        let named = |(number, interface): (u32, &InterfaceConfig)| match interface {
            InterfaceConfig::Netdev(name) => Some((number, name.clone())),
            InterfaceConfig::Dgram(_) => None,
        };
        let mut names = (0..).zip(&self.interfaces).filter_map(named).peekable();
        let any = names.peek().is_some();
        any.then(|| Watch::new(names)).transpose()
    }

    /// Opens them.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn open(self) -> Result<Uplinks, OpenUplink> {
        let tunnel = |wire: Wire| Tunnel::open(wire.address, wire.directory, wire.returns);
        let interface = |interface| match interface {
            InterfaceConfig::Dgram(dgram) => {
                let opened = Interface::open(dgram.local, dgram.remote);
                opened.map_err(|error| OpenUplink::Dgram(dgram.local, error))
            }
            InterfaceConfig::Netdev(name) => {
                let joined = Interface::join(&name);
                joined.map_err(|error| OpenUplink::Netdev(name, error))
            }
        };
        let tunnel = self.wire.map(tunnel).transpose();
        let interfaces = self.interfaces.into_iter().map(interface);
        Ok(Uplinks {
            tunnel: tunnel.map_err(OpenUplink::Wire)?,
            interfaces: interfaces.collect::<Result<_, _>>()?,
        })
    }
}

/// The network between hosts, and this one's place in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wire {
    /// This host's address.
    pub address: SocketAddr,
    /// The longest IP packet between hosts, bytes.
    pub mtu: usize,
    /// Which GIDs are at which host.
    pub directory: Directory,
    /// What goes to a group comes to this host, too: VMs of this process meet outside.
    pub returns: bool,
}

impl WireConfig {
    fn settings(self) -> Result<Wire, Error> {
        let mtu = mtu_or_usual(self.mtu)?;
        let at = |host: HostConfig| {
            let address = host.address.0;
            host.gids.into_iter().map(move |range| range.at(address))
        };
        Ok(Wire {
            address: self.address.0,
            mtu,
            directory: Directory::new(self.host.into_iter().flat_map(at).collect()),
            returns: false,
        })
    }
}

impl Wire {
    /// The way that VMs of network `vni` have.
    fn uplink(&self, vni: u32) -> Uplink {
        Uplink {
            local: Local::default(),
            congestion: Congestion::default(),
            segment: Segment::Vxlan(vni),
            active_mtu: path_mtu_within(inner_mtu(self.address, self.mtu)),
        }
    }
}

/// The configuration file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
struct File {
    workers: Option<u16>,
    #[serde(alias = "poll_us")]
    poll_us: Option<u64>,
    drain: Option<f64>,
    cpus: Vec<usize>,
    #[serde(alias = "status_socket")]
    status_socket: Option<PathBuf>,
    metrics: Option<socket::Address>,
    #[serde(alias = "log_format")]
    log_format: Option<LogFormat>,
    #[serde(alias = "socket_mode")]
    socket_mode: Option<String>,
    #[serde(alias = "socket_owner")]
    socket_owner: Option<String>,
    #[serde(alias = "socket_group")]
    socket_group: Option<String>,
    user: Option<String>,
    sandbox: Option<Mode>,
    limits: Limits,
    wire: Option<WireConfig>,
    device: Vec<DeviceConfig>,
}

/// A configuration that makes sense.
#[derive(Debug)]
pub struct Config {
    /// Of the process.
    pub adapter: AdapterSettings,
    /// Of each VM, as it is asked for and what that comes to.
    pub devices: Vec<(DeviceConfig, RnicSettings)>,
    /// How long work requests may go on when the process is told to end.
    pub drain: Duration,
    /// What others are to be made of that are asked for later.
    pub defaults: Defaults,
    /// Where the status is given.
    pub status_socket: Option<PathBuf>,
    /// Where metrics are told.
    pub metrics: Option<socket::Address>,
    /// The form of the log.
    pub log_format: LogFormat,
    /// The ways out of this process.
    pub uplinks: UplinksConfig,
    /// Who may connect to the sockets.
    pub access: Access,
    /// What the process gives up.
    pub sandbox: sandbox::Settings,
}

impl Config {
    /// What command line and configuration file ask for together.
    ///
    /// # Errors
    /// If the file cannot be read, or something in either makes no sense.
    pub fn new(args: ServeArgs) -> Result<Self, Error> {
        let file = args
            .config
            .as_deref()
            .map(read)
            .transpose()?
            .unwrap_or_default();
        Self::merge(args, file)
    }

    fn merge(args: ServeArgs, file: File) -> Result<Self, Error> {
        let mut adapter = AdapterSettings {
            cpus: file.cpus,
            ..AdapterSettings::default()
        };
        adapter.workers = args
            .workers
            .or(file.workers)
            .unwrap_or_else(default_workers);
        if !(1..=MAX_WORKERS).contains(&adapter.workers) {
            return Err(Error::Workers(adapter.workers));
        }
        if let Some(us) = args.poll_us.or(file.poll_us) {
            adapter.poll_budget = Duration::from_micros(us);
        }
        if adapter.poll_budget > MAX_POLL {
            return Err(Error::Poll(adapter.poll_budget));
        }

        let drain = args.drain.or(file.drain).map(drain_time).transpose()?;
        let mut uplinks = UplinksConfig {
            wire: file.wire.map(WireConfig::settings).transpose()?,
            interfaces: Vec::new(),
        };
        let mut seen = HashSet::new();
        let count = file.device.len() + args.socket_path.len() + args.vfio_user_path.len();
        let limits = Limits {
            memory: file.limits.memory.or(Some(memory_of_each(count))),
            ..file.limits
        };
        let devices = file
            .device
            .into_iter()
            .chain(args.socket_path)
            .chain(args.vfio_user_path)
            .map(|device| {
                if !seen.insert(device.socket.clone()) {
                    return Err(Error::Twice(device.socket));
                }
                let settings = device.clone().settings(limits, &mut uplinks)?;
                Ok((device, settings))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let status_socket = args.status_socket.or(file.status_socket);
        if devices.is_empty() && status_socket.is_none() {
            return Err(Error::NoDevice);
        }
        check_together(devices.iter().map(|(_, device)| device))?;
        let connections = devices.iter().filter(|(_, of)| of.iwarp.is_some()).count();
        adapter.iwarp = connections != 0;
        let metrics = args.metrics.or(file.metrics);
        let sockets = devices.iter().map(|(device, _)| &*device.socket);
        let sockets = sockets.chain(status_socket.as_deref());
        let sockets = sockets.chain(metrics.as_ref().and_then(socket::Address::path));
        let run_as = args.user.or(file.user);
        let sandbox = sandbox::Settings {
            mode: args.sandbox.or(file.sandbox).unwrap_or_default(),
            user: run_as.map(identity).transpose()?,
            directories: sockets.map(directory).collect(),
            more_descriptors: match status_socket {
                Some(_) => LATER_DEVICES * DESCRIPTORS_EACH,
                None => 0,
            },
            descriptors: descriptors_for(devices.len() as u64)
                + (MOST_CONNECTIONS * connections) as u64,
            connections: connections != 0,
        };
        let defaults = Defaults {
            limits: file.limits,
            wire: uplinks.wire.clone(),
        };
        Ok(Self {
            adapter,
            devices,
            drain: drain.unwrap_or(USUAL_DRAIN),
            defaults,
            status_socket,
            metrics,
            log_format: args.log_format.or(file.log_format).unwrap_or_default(),
            uplinks,
            sandbox,
            access: access(
                args.socket_mode.or(file.socket_mode),
                args.socket_owner.or(file.socket_owner),
                args.socket_group.or(file.socket_group),
            )?,
        })
    }
}

fn drain_time(seconds: f64) -> Result<Duration, Error> {
    let time = Duration::try_from_secs_f64(seconds);
    time.ok()
        .filter(|time| *time <= MAX_DRAIN)
        .ok_or(Error::Drain(seconds))
}

/// What devices are made of that are asked for when the process runs, beside what is asked for.
#[derive(Debug, Clone)]
pub struct Defaults {
    /// Limits of each.
    pub limits: Limits,
    /// The network between hosts.
    pub wire: Option<Wire>,
}

/// A device that is asked for when the process runs.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// What it is to be.
    #[serde(deserialize_with = "device")]
    pub device: DeviceConfig,
    /// Its limits; otherwise those that were there from the start.
    pub limits: Option<Limits>,
}

/// A device as in the file, or as on the command line.
fn device<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DeviceConfig, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "a device is an object, or the text of --socket-path"
    )]
    enum Said {
        Text(String),
        Table(Box<DeviceConfig>),
    }
    match Said::deserialize(deserializer)? {
        Said::Text(text) => text.parse().map_err(D::Error::custom),
        Said::Table(device) => Ok(*device),
    }
}

impl Defaults {
    /// Settings of one of `count` devices that is asked for when the process runs.
    ///
    /// # Errors
    /// If they make no sense, or it takes what is opened at the start.
    pub fn settings(
        &self,
        asked: &DeviceConfig,
        limits: Limits,
        count: usize,
    ) -> Result<RnicSettings, Error> {
        let late = |what| Err(Error::Late(asked.socket.clone(), what));
        if asked.dgram.is_some() || asked.netdev.is_some() {
            return late("an interface of its own");
        }
        let mut uplinks = UplinksConfig {
            wire: self.wire.clone(),
            interfaces: Vec::new(),
        };
        let limits = Limits {
            memory: limits.memory.or(Some(memory_of_each(count))),
            ..limits
        };
        let settings = asked.clone().settings(limits, &mut uplinks)?;
        if uplinks.wire != self.wire {
            return late("a network between hosts that it is not alone in");
        }
        Ok(settings)
    }
}

/// Whether devices can be served by one process.
///
/// # Errors
/// If two cannot.
pub(crate) fn check_together<'a>(
    devices: impl IntoIterator<Item = &'a RnicSettings>,
) -> Result<(), Error> {
    let (mut networks, mut addresses) = (HashMap::new(), HashSet::new());
    for device in devices {
        let address = device.iwarp.as_ref().map(|port| port.address);
        if let Some(address) = address.filter(|address| !addresses.insert(*address)) {
            return Err(Error::IwarpTwice(device.name.clone(), address));
        }
        let Some(Segment::Vxlan(vni)) = device.uplink.map(|uplink| uplink.segment) else {
            continue;
        };
        if *networks.entry(vni).or_insert(&device.network) != &device.network {
            return Err(Error::TwoNetworks(vni));
        }
    }
    Ok(())
}

impl DeviceConfig {
    /// What its VM is to have of the workers.
    ///
    /// # Errors
    /// If the weight is out of range.
    pub(crate) fn share(&self) -> Result<ShareSettings, Error> {
        let weight = self.weight.unwrap_or(USUAL_WEIGHT);
        if !(1..=MOST_WEIGHT).contains(&weight) {
            return Err(Error::Weight {
                socket: self.socket.clone(),
                weight,
            });
        }
        Ok(ShareSettings {
            weight,
            bytes_per_second: self.bytes_per_second,
            messages_per_second: self.messages_per_second,
        })
    }

    /// This one, but with what another one has of the workers.
    pub(crate) fn with_share_of(&self, other: &Self) -> Self {
        Self {
            weight: other.weight,
            bytes_per_second: other.bytes_per_second,
            messages_per_second: other.messages_per_second,
            ..self.clone()
        }
    }

    fn settings(self, limits: Limits, uplinks: &mut UplinksConfig) -> Result<RnicSettings, Error> {
        let share = self.share()?;
        let mut settings = RnicSettings {
            name: self.socket.display().to_string(),
            mac: self.mac.map_or([0; 6], |mac| mac.0),
            limits: Limits {
                footprint: self.footprint.or(limits.footprint),
                memory: self.memory.or(limits.memory),
                ..limits
            },
            ..RnicSettings::default()
        };
        if let Some(queues) = self.completion_queues {
            if !(1..=MAX_COMPLETION_QUEUES).contains(&queues) {
                return Err(Error::CompletionQueues {
                    socket: self.socket,
                    queues,
                });
            }
            settings.completion_queues = queues;
        }
        if let Some(network) = self.network {
            settings.network = network;
        }
        let ways = [
            self.vni.is_some(),
            self.dgram.is_some(),
            self.netdev.is_some(),
        ];
        if ways.iter().filter(|way| **way).count() > 1 {
            return Err(Error::TwoWays(self.socket));
        }
        if self.iwarp.is_some() != (self.transport == Transport::Iwarp) {
            return Err(Error::Iwarp(self.socket));
        }
        if self.iwarp.is_some() && ways.contains(&true) {
            return Err(Error::IwarpAndFrames(self.socket));
        }
        if let Some(IwarpConfig { address, .. }) = &self.iwarp {
            if address.is_unspecified() || address.is_multicast() {
                return Err(Error::IwarpAddress(self.socket, *address));
            }
        }
        settings.iwarp = self.iwarp.map(|iwarp| Arc::new(iwarp.settings()));
        let number = u32::try_from(uplinks.interfaces.len()).unwrap_or(u32::MAX);
        if let Some(dgram) = self.dgram {
            settings.uplink = Some(dgram.uplink(number)?);
            uplinks.interfaces.push(InterfaceConfig::Dgram(dgram));
        }
        if let Some(netdev) = self.netdev {
            let Some(mtu) = mtu_of(&netdev) else {
                return Err(Error::NoNetdev(self.socket, netdev));
            };
            settings.uplink = Some(Uplink {
                local: Local::default(),
                congestion: Congestion::default(),
                segment: Segment::Own(number),
                active_mtu: path_mtu_within(mtu),
            });
            uplinks.interfaces.push(InterfaceConfig::Netdev(netdev));
        }
        if let Some(vni) = self.vni {
            let Some(wire) = &mut uplinks.wire else {
                return Err(Error::NoWire(self.socket));
            };
            wire.returns |= self.local.is_some_and(|local| local != Local::Process);
            if !(1..=MAX_VNI).contains(&vni) {
                let socket = self.socket;
                return Err(Error::Vni { socket, vni });
            }
            settings.uplink = Some(wire.uplink(vni));
        }
        match &mut settings.uplink {
            Some(uplink) => {
                uplink.local = self.local.unwrap_or_default();
                uplink.congestion = self.congestion.unwrap_or_default();
            }
            None if self.local.is_some() => {
                return Err(Error::NotOutside(self.socket, "local"));
            }
            None if self.congestion.is_some() => {
                return Err(Error::NotOutside(self.socket, "congestion"));
            }
            None => {}
        }
        if let Some(faults) = self.faults {
            if settings.uplink.is_none() {
                return Err(Error::NoFrames(self.socket));
            }
            if self.mac.is_none() {
                return Err(Error::FaultsWithoutMac(self.socket));
            }
            let said = |why| Error::Faults(self.socket.clone(), why);
            settings.faults = faults.settings().map_err(said)?;
        }
        settings.share = Arc::new(WorkerShare::new(&share));
        let strict = self.gids == Gids::Mac;
        if strict && self.mac.is_none() {
            return Err(Error::NoMac(self.socket));
        }
        if !strict && !self.vlans.is_empty() {
            return Err(Error::VlansWithoutPolicy(self.socket));
        }
        let addresses = self.addresses.into_iter();
        settings.gid_policy = GidPolicy {
            gids: self.gids,
            addresses: addresses.map(|ip| gid_policy::of_address(ip.0)).collect(),
            vlans: self.vlans.into_iter().map(|vlan| vlan.0).collect(),
        };
        Ok(settings)
    }
}

fn read_text(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| Error::Read {
        path: path.to_owned(),
        source,
    })
}

fn read(path: &Path) -> Result<File, Error> {
    let text = read_text(path)?;
    toml::from_str(&text).map_err(|source| Error::Parse {
        path: path.to_owned(),
        source: Box::new(source),
    })
}

/// The devices of a configuration file in the order that they have there, each in the form of
/// [`Asked`].
///
/// # Errors
/// If it cannot be read.
pub(crate) fn devices_of(path: &Path) -> Result<Vec<serde_json::Value>, Error> {
    let parse = |source| Error::Parse {
        path: path.to_owned(),
        source: Box::new(source),
    };
    let text = read_text(path)?;
    let file: toml::Table = toml::from_str(&text).map_err(parse)?;
    let limits = file.get("limits");
    let devices = file.get("device").and_then(toml::Value::as_array);
    let devices = devices.into_iter().flatten();
    let devices = devices.map(|device| match limits {
        Some(limits) => serde_json::json!({ "device": device, "limits": limits }),
        // None are other limits than those that were there from the start.
        None => serde_json::json!({ "device": device, "limits": {} }),
    });
    Ok(devices.collect())
}

fn mode(text: String) -> Result<u32, Error> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    match u32::from_str_radix(&text, 8) {
        Ok(mode) if digits && mode <= 0o777 => Ok(mode),
        _ => Err(Error::Mode(text)),
    }
}

/// Who may connect to a socket with these permissions, owner and group.
///
/// # Errors
/// If there is no such owner or group, or the permissions are none.
pub fn access(
    permissions: Option<String>,
    owner: Option<String>,
    of_group: Option<String>,
) -> Result<Access, Error> {
    Ok(Access {
        mode: permissions.map(mode).transpose()?,
        owner: owner.map(user).transpose()?,
        group: of_group.map(group).transpose()?,
    })
}

fn user(name: String) -> Result<u32, Error> {
    let found = || User::from_name(&name).ok().flatten();
    let id = name.parse().ok().or_else(|| Some(found()?.uid.as_raw()));
    id.ok_or(Error::Nobody { kind: "user", name })
}

fn identity(name: String) -> Result<Identity, Error> {
    Identity::named(&name).ok_or(Error::Nobody { kind: "user", name })
}

/// Where a socket is.
fn directory(socket: &Path) -> PathBuf {
    let parent = socket.parent();
    let parent = parent.filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new(".")).to_owned()
}

fn group(name: String) -> Result<u32, Error> {
    let found = || Group::from_name(&name).ok().flatten();
    let id = name.parse().ok().or_else(|| Some(found()?.gid.as_raw()));
    id.ok_or(Error::Nobody {
        kind: "group",
        name,
    })
}

/// File descriptors that are enough for so many devices.
pub(crate) fn descriptors_for(devices: u64) -> u64 {
    DESCRIPTORS + DESCRIPTORS_EACH * devices
}

/// Workers where nothing else is asked for.
pub(crate) fn default_workers() -> u16 {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    // At most MAX_DEFAULT_WORKERS.
    (cpus / 2).clamp(1, MAX_DEFAULT_WORKERS) as u16
}

#[cfg(test)]
mod tests {
    use virtio_rdma_spec::verbs::mtu;

    use super::*;

    fn device(text: &str) -> Result<DeviceConfig, String> {
        text.parse().map_err(|e: Error| e.to_string())
    }

    fn config(cli: &[&str], file: &str) -> Result<Config, String> {
        let args = Args::try_parse_from([&["vhost-device-rdma"], cli].concat())
            .map_err(|e| e.to_string())?;
        let file = toml::from_str(file).map_err(|e| e.to_string())?;
        Config::merge(args.serve, file).map_err(|e| e.to_string())
    }

    #[test]
    fn a_device_has_a_front_end() {
        let config = config(
            &["--socket-path", "a", "--vfio-user-path", "b,network=n"],
            "[[device]]\nsocket = 'c'\nfront-end = 'vfio-user'\n",
        );
        let config = config.unwrap();
        let paths: Vec<_> = config
            .devices
            .iter()
            .map(|(device, _)| &*device.socket)
            .collect();
        assert_eq!(paths, ["c", "a", "b"].map(Path::new));
        assert_eq!(config.devices[2].1.network, "n");
        let (vhost, vfio) = (FrontEnd::VhostUser, FrontEnd::VfioUser);
        let front_ends = config.devices.iter().map(|(device, _)| device.front_end);
        assert_eq!(front_ends.collect::<Vec<_>>(), [vfio, vhost, vfio]);
    }

    #[test]
    fn sockets_are_parsed() {
        let plain = device("/run/a.sock").unwrap();
        assert_eq!(plain.socket, Path::new("/run/a.sock"));
        assert_eq!(
            (plain.mac, plain.network, plain.completion_queues),
            (None, None, None)
        );
        assert_eq!((plain.footprint, plain.memory), (None, None));
        let full = device("a,mac=52:54:00:aB:cd:EF,network=blue,completion-queues=3").unwrap();
        assert_eq!(full.mac, Some(Mac([0x52, 0x54, 0, 0xab, 0xcd, 0xef])));
        assert_eq!(full.network.as_deref(), Some("blue"));
        assert_eq!(full.completion_queues, Some(3));
        let shares = device("a,weight=7,bytes-per-second=8,messages-per-second=9").unwrap();
        let wanted = ShareSettings {
            weight: 7,
            bytes_per_second: NonZeroU64::new(8),
            messages_per_second: NonZeroU64::new(9),
        };
        assert_eq!(shares.share().unwrap(), wanted);
        let out = device("a,vni=3,front-end=vfio-user").unwrap();
        assert_eq!((out.vni, out.front_end), (Some(3), FrontEnd::VfioUser));
        assert_eq!(device("a,netdev=x0").unwrap().netdev.as_deref(), Some("x0"));
        for bad in [
            "a,weight=x",
            "a,weight=-1",
            "a,bytes-per-second=0",
            "a,messages-per-second=1k",
            "a,vni=x",
            "a,front-end=vhost",
            "",
            ",mac=52:54:00:12:34:56",
            "a,mac=52:54:00:12:34",
            "a,mac=52:54:00:12:34:56:78",
            "a,mac=53:54:00:12:34:56",
            "a,mac=00:00:00:00:00:00",
            "a,mac=+2:54:00:12:34:56",
            "a,speed=9",
            "a,completion-queues=x",
            "a,",
            "a,gids=all",
            "a,gids",
            "a,address=10.0.0",
            "a,address=10.0.0.0/8",
            "a,address=0.0.0.0",
            "a,address=::",
            "a,address=::ffff:0.0.0.0",
            "a,address=224.0.0.1",
            "a,address=::ffff:224.0.0.1",
            "a,address=ff02::1",
            "a,vlan=4095",
            "a,vlan=65535",
            "a,vlan=-1",
            "a,vlan=x",
            "a,footprint=1G",
            "a,memory=-1",
            "a,memory",
        ] {
            assert!(device(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_file_of_the_package_is_one_to_be_filled_in() {
        let file = include_str!("../../packaging/vhost-device-rdma.toml").replace("kvm", "root");
        assert!(config(&[], &file).unwrap().devices.is_empty());
        // The examples in it, without their marks of a comment.
        let line = |line: &str| {
            let example = line.strip_prefix("# ").unwrap_or(line);
            let is_one = example.starts_with("[[") || example.contains(" = ");
            format!("{}\n", if is_one { example } else { line })
        };
        let filled_in: String = file.lines().map(line).collect();
        let config = config(&[], &filled_in).unwrap();
        assert_eq!(config.devices.len(), 2, "{filled_in}");
        let directory = |path: &Path| path.parent().map(Path::to_owned);
        let tmpfiles = include_str!("../../packaging/systemd/tmpfiles.conf");
        let status = config.status_socket.as_deref();
        for socket in config
            .devices
            .iter()
            .map(|(device, _)| device.socket.as_path())
            .chain(status)
        {
            let directory = directory(socket).unwrap();
            let made = format!("d {} ", directory.display());
            assert!(
                tmpfiles.contains(&made),
                "nobody makes {}",
                directory.display()
            );
        }
    }

    #[test]
    fn shares_are_given_in_the_file() {
        let share = |keys: &str| {
            let file = format!("[[device]]\nsocket = 'a'\n{keys}\n");
            config(&[], &file).map(|config| config.devices[0].1.share.settings())
        };
        assert_eq!(share(""), Ok(ShareSettings::default()));
        let given = ShareSettings {
            weight: 300,
            bytes_per_second: NonZeroU64::new(1 << 30),
            messages_per_second: NonZeroU64::new(1000),
        };
        let keys = "weight = 300\nbytes-per-second = 1073741824\nmessages-per-second = 1000";
        assert_eq!(share(keys), Ok(given));
        for bad in [
            "weight = 0",
            "weight = 10001",
            "bytes-per-second = 0",
            "messages-per-second = -1",
        ] {
            assert!(share(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn limits_are_of_all_devices_or_of_one() {
        let limits = |file: &str| {
            let cli = [
                "--socket-path",
                "a",
                "--socket-path",
                "b,footprint=5,memory=6",
            ];
            let config = config(&cli, file).unwrap();
            let limits = config.devices.iter().map(|(_, device)| device.limits);
            limits
                .map(|limits| (limits.footprint, limits.memory()))
                .collect::<Vec<_>>()
        };
        let own = (Some(5), 6);
        assert_eq!(limits(""), [(None, 16 << 40), own]);
        let all = "[limits]\nfootprint = 7\nmemory = 8\n";
        assert_eq!(limits(all), [(Some(7), 8), own]);
        let more = "[[device]]\nsocket = 'c'\nfootprint = 9\n";
        let of_file = limits(&format!("{all}{more}"));
        assert_eq!(of_file, [(Some(9), 8), (Some(7), 8), own]);
        // Ten share half of the address space.
        let many: String = (0..8)
            .map(|i| format!("[[device]]\nsocket = '{i}'\n"))
            .collect();
        assert_eq!(limits(&many)[0], (None, (1 << 46) / 10));
    }

    const OF_ONE: &str = "mac=52:54:00:12:34:01,gids=mac,\
                          address=10.0.0.1,address=fd00::1,vlan=5,vlan=0";

    #[test]
    fn gids_are_given_alike_on_the_command_line_and_in_the_file() {
        let file = "[[device]]\nsocket = 'a'\nmac = '52:54:00:12:34:01'\ngids = 'mac'\n\
                    addresses = ['10.0.0.1', 'fd00::1']\nvlans = [5, 0]\n";
        let other = "b,mac=52:54:00:12:34:02,network=n,address=10.0.0.2";
        let cli = config(
            &[
                "--socket-path",
                &format!("a,{OF_ONE}"),
                "--socket-path",
                other,
            ],
            "",
        );
        let both = config(&["--socket-path", other], file);
        let gid = |text: &str| gid_policy::of_address(text.parse().unwrap());
        for config in [cli.unwrap(), both.unwrap()] {
            let [a, b] = [0, 1].map(|i| config.devices[i].1.gid_policy.clone());
            assert_eq!(a.gids, Gids::Mac);
            assert_eq!(a.addresses, [gid("10.0.0.1"), gid("fd00::1")]);
            assert_eq!(a.vlans, [5, 0]);
            assert_eq!((b.gids, b.vlans), (Gids::Any, vec![]));
            // All of these are reserved, each in its network.
            let reserved = [
                ("default", "fe80::5054:ff:fe12:3401"),
                ("default", "10.0.0.1"),
                ("default", "fd00::1"),
                ("n", "fe80::5054:ff:fe12:3402"),
                ("n", "10.0.0.2"),
            ];
            let reserved = reserved.map(|(network, ip)| (network, gid(ip)));
            let devices = config.devices.iter().map(|(_, device)| device);
            let own = devices
                .flat_map(|device| device.own_gids().map(|gid| (device.network.as_str(), gid)));
            assert_eq!(own.collect::<Vec<_>>(), reserved);
        }
        let plain = config(&["--socket-path", "a"], "").unwrap();
        assert_eq!(plain.devices[0].1.gid_policy, GidPolicy::default());
        assert_eq!(plain.devices[0].1.own_gids().count(), 0);
    }

    #[test]
    fn policies_that_make_no_sense_are_refused_in_a_sentence() {
        let cli = |device: &str| config(&["--socket-path", device], "").unwrap_err();
        assert_eq!(
            cli("a,gids=mac"),
            "a has gids=mac and no MAC address: give mac= as well"
        );
        assert_eq!(
            cli("a,mac=52:54:00:12:34:01,vlan=5"),
            "a has a list of VLANs, which means nothing without gids=mac"
        );
        let file = |line: &str| config(&[], &format!("[[device]]\nsocket = 'a'\n{line}"));
        assert_eq!(file("gids = 'mac'").unwrap_err(), cli("a,gids=mac"));
        for (line, why) in [
            ("gids = 'all'", "`any` or `mac`"),
            ("addresses = ['ff02::1']", "'ff02::1' is not the IP address"),
            ("addresses = '10.0.0.1'", "a sequence"),
            ("vlans = [4095]", "'4095' is not a VLAN id (0 to 4094)"),
            ("vlans = [70000]", "u16"),
        ] {
            let error = file(line).unwrap_err();
            assert!(error.contains(why), "{line}: {error}");
        }
    }

    const WIRE: &str = "[wire]\naddress = '192.0.2.1'\n\
        [[wire.host]]\naddress = '192.0.2.2'\ngids = ['10.0.0.0/24', 'fd00::/64']\n";

    #[test]
    fn the_wire_is_given_in_the_file() {
        let file = format!("{WIRE}[[device]]\nsocket = 'a'\nvni = 7\n[[device]]\nsocket = 'b'\n");
        let config = config(&[], &file).unwrap();
        let wire = config.uplinks.wire.unwrap();
        assert_eq!(
            (wire.address, wire.mtu),
            ("192.0.2.1:4789".parse().unwrap(), 1500)
        );
        let host = "192.0.2.2:4789".parse().unwrap();
        let [v4, v6] = ["10.0.0.0", "fd00::"].map(|ip| gid_policy::of_address(ip.parse().unwrap()));
        let entry = |prefix, bits| Entry { prefix, bits, host };
        let directory = Directory::new(vec![entry(v4, 96 + 24), entry(v6, 64)]);
        assert_eq!(wire.directory, directory);
        let uplinks = config.devices.iter().map(|(_, device)| device.uplink);
        let uplink = Uplink {
            local: Local::default(),
            congestion: Congestion::default(),
            segment: Segment::Vxlan(7),
            active_mtu: mtu::MTU_1024,
        };
        assert_eq!(uplinks.collect::<Vec<_>>(), [Some(uplink), None]);
    }

    #[test]
    fn interfaces_are_given_in_the_file() {
        let dgram = |socket: &str, port: u16, more: &str| {
            format!(
                "[[device]]\nsocket = '{socket}'\n\
                 dgram = {{ local = '127.0.0.1:{port}', remote = '[::1]:9'{more} }}\n"
            )
        };
        let file = dgram("a", 1, "") + &dgram("b", 2, ", mtu = 9000");
        let both = config(&[], &file).unwrap();
        let uplinks = both
            .devices
            .iter()
            .map(|(_, device)| device.uplink.unwrap());
        let uplink = |number, active_mtu| Uplink {
            local: Local::default(),
            congestion: Congestion::default(),
            segment: Segment::Own(number),
            active_mtu,
        };
        let expected = [uplink(0, mtu::MTU_1024), uplink(1, mtu::MTU_4096)];
        assert_eq!(uplinks.collect::<Vec<_>>(), expected);
        let ports = both.uplinks.interfaces.iter();
        let port = |interface: &InterfaceConfig| match interface {
            InterfaceConfig::Dgram(dgram) => Some(dgram.local.port()),
            InterfaceConfig::Netdev(_) => None,
        };
        assert_eq!(ports.map(port).collect::<Vec<_>>(), [Some(1), Some(2)]);
        let file = dgram("a", 1, "") + "local = false\n";
        let outside = config(&[], &file).unwrap().devices[0].1.uplink.unwrap();
        assert_eq!(outside.local, Local::Vm);
        let local = |said: &str| config(&[], &(dgram("a", 1, "") + said));
        let nothing = local("local = 'nothing'\n").unwrap().devices[0]
            .1
            .uplink
            .unwrap();
        assert_eq!(nothing.local, Local::Nothing);
        let said = local("local = 'vm'\n").unwrap_err();
        assert!(said.contains("true, false, or \"nothing\""), "{said}");
        let said = config(&[], "[[device]]\nsocket = 'a'\nlocal = true\n").unwrap_err();
        assert!(said.contains("a has local, but no way out"), "{said}");
        let file = dgram("a", 1, "") + "congestion = 'none'\n";
        let even = config(&[], &file).unwrap().devices[0].1.uplink.unwrap();
        assert_eq!(even.congestion, Congestion::None);
        let said = config(&[], "[[device]]\nsocket = 'a'\ncongestion = 'window'\n").unwrap_err();
        assert!(said.contains("a has congestion, but no way out"), "{said}");
        let of_host = config(&[], "[[device]]\nsocket = 'a'\nnetdev = 'lo'\n").unwrap();
        assert_eq!(of_host.devices[0].1.uplink, Some(uplink(0, mtu::MTU_4096)));
        let named = InterfaceConfig::Netdev("lo".to_owned());
        assert_eq!(of_host.uplinks.interfaces, [named]);
        let said = config(&[], "[[device]]\nsocket = 'a'\nnetdev = 'x0'\n").unwrap_err();
        assert!(
            said.contains("a has netdev x0, but the host has no"),
            "{said}"
        );
        let said = config(&[], &(dgram("a", 1, "") + "netdev = 'lo'\n")).unwrap_err();
        assert!(said.contains("more than one of"), "{said}");
        let with_mac = dgram("a", 1, "") + "mac = '52:54:00:12:34:01'\n";
        let file = with_mac.clone() + "faults = { out = 'loss=1%' }\n";
        let faults = config(&[], &file).unwrap().devices[0].1.faults;
        assert_eq!(faults.sent, Some("loss=0.01".parse().unwrap()));
        assert_eq!(faults.received, None);
        let said = config(&[], &(dgram("a", 1, "") + "faults = 'seed=3'\n")).unwrap_err();
        assert!(said.contains("a has faults and no MAC address"), "{said}");
        let file = with_mac.clone() + "faults = 'seed=3'\n";
        let faults = config(&[], &file).unwrap().devices[0].1.faults;
        assert_eq!(faults.sent, Some("seed=3".parse().unwrap()));
        assert_eq!(faults.received, faults.sent);
        let said = config(&[], "[[device]]\nsocket = 'a'\nfaults = 'seed=3'\n").unwrap_err();
        assert!(
            said.contains("a has faults, but only frames have them"),
            "{said}"
        );
        let said = config(&[], &(with_mac + "faults = 'x'\n")).unwrap_err();
        assert!(said.contains("the faults of a: 'x' is no fault"), "{said}");
        let said = config(&[], &format!("{WIRE}{}vni = 7\n", dgram("a", 1, ""))).unwrap_err();
        assert!(
            said.contains("more than one of vni, dgram and netdev"),
            "{said}"
        );
        let said = config(&[], &dgram("a", 1, ", mtu = 100")).unwrap_err();
        assert!(said.contains("an mtu of 100"), "{said}");
    }

    #[test]
    fn the_path_mtu_is_what_fits_between_hosts() {
        let active = |address: &str, mtu: u32| {
            let file = format!(
                "[wire]\naddress = '{address}'\nmtu = {mtu}\n[[device]]\nsocket = 'a'\nvni = 1\n"
            );
            config(&[], &file).unwrap().devices[0]
                .1
                .uplink
                .unwrap()
                .active_mtu
        };
        assert_eq!(active("192.0.2.1", 9000), mtu::MTU_4096);
        assert_eq!(active("192.0.2.1", 4226), mtu::MTU_4096);
        // The longer header of IPv6 between hosts.
        assert_eq!(active("2001:db8::1", 4226), mtu::MTU_2048);
        assert_eq!(active("[2001:db8::1]:4790", 576), mtu::MTU_256);
    }

    #[test]
    fn wires_that_make_no_sense_are_refused_in_a_sentence() {
        let device = |keys: &str| format!("[[device]]\nsocket = 'a'\n{keys}\n");
        let refused = |file: &str| config(&[], file).unwrap_err();
        let said = refused(&device("vni = 7"));
        assert!(
            said.contains("a has a vni, but the file has no [wire]"),
            "{said}"
        );
        for (vni, there) in [(0, "0"), (1 << 24, "16777216")] {
            let said = refused(&format!("{WIRE}{}", device(&format!("vni = {vni}"))));
            assert_eq!(
                said,
                format!("the vni {there} of a: there must be 1 to 16777215")
            );
        }
        let two = "[[device]]\nsocket = 'b'\nnetwork = 'n'\nvni = 7\n";
        let said = refused(&format!("{WIRE}{}{two}", device("vni = 7")));
        assert!(said.contains("vni 7 is given to two networks"), "{said}");
        for (line, what) in [
            ("address = 'x'", "is not the address of a host"),
            ("address = '0.0.0.0'", "is not the address of a host"),
            ("address = '192.0.2.1:0'", "is not the address of a host"),
            ("address = '192.0.2.1'\nmtu = 500", "an mtu of 500 between hosts"),
            (
                "address = '192.0.2.1'\n[[wire.host]]\naddress = '192.0.2.2'\ngids = ['10.0.0.0/33']",
                "is not a range of IP addresses",
            ),
        ] {
            let said = refused(&format!("[wire]\n{line}\n{}", device("")));
            assert!(said.contains(what), "{said}");
        }
    }

    #[test]
    fn ports_of_iwarp_are_given_in_the_file() {
        let port = |socket: &str, keys: &str| {
            format!(
                "[[device]]\nsocket = '{socket}'\ntransport = 'iwarp'\n[device.iwarp]\n{keys}\n"
            )
        };
        let file = port("a", "address = '10.0.0.1'")
            + &port(
                "b",
                "address = 'fd00::1'\ncrc = false\npeers = ['10.7.0.0/16']\n\
                 directory = { '192.168.0.1' = '10.0.0.1' }",
            );
        let good = config(&[], &file).unwrap();
        assert!(good.adapter.iwarp && good.sandbox.connections);
        let of = |i: usize| good.devices[i].1.iwarp.clone().unwrap();
        assert!(of(0).crc && !of(1).crc && !of(1).peer_to_peer);
        assert_eq!(of(1).peers, [("10.7.0.0".parse().unwrap(), 16)]);
        assert_eq!(of(1).directory.len(), 1);
        let plain = config(&[], "[[device]]\nsocket = 'a'").unwrap();
        assert!(!plain.adapter.iwarp && !plain.sandbox.connections);
        let twice = port("a", "address = '10.0.0.1'") + &port("b", "address = '10.0.0.1'");
        for (file, what) in [
            (port("a", "address = '0.0.0.0'"), "which is none of a host"),
            (port("a", "address = 'ff02::1'"), "which is none of a host"),
            (twice, "which another device of iWARP has"),
            (
                "[[device]]\nsocket = 'a'\ntransport = 'iwarp'".to_owned(),
                "belong together",
            ),
            (
                "[[device]]\nsocket = 'a'\niwarp = { address = '10.0.0.1' }".to_owned(),
                "belong together",
            ),
            (
                "[[device]]\nsocket = 'a'\ntransport = 'iwarp'\nvni = 3\n\
                 iwarp = { address = '10.0.0.1' }"
                    .to_owned(),
                "goes with no vni",
            ),
        ] {
            let said = config(&[], &file).unwrap_err();
            assert!(said.contains(what), "{said}");
        }
    }

    #[test]
    fn command_line_and_file_come_together() {
        let file =
            "workers = 3\npoll-us = 7\ncpus = [1, 2]\nstatus-socket = 's'\nlog-format = 'json'\n\
                    [limits]\n[[device]]\nsocket = 'a'\n";
        let text = config(&["--log-format", "text"], file).unwrap();
        assert_eq!(text.log_format, LogFormat::Text);
        let both = config(&["--socket-path", "b,network=n", "--workers", "2"], file).unwrap();
        assert_eq!(both.adapter.workers, 2);
        assert_eq!(both.adapter.poll_budget, Duration::from_micros(7));
        assert_eq!(both.adapter.cpus, [1, 2]);
        assert_eq!(both.log_format, LogFormat::Json);
        assert_eq!(both.status_socket.as_deref(), Some(Path::new("s")));
        let sockets: Vec<_> = both
            .devices
            .iter()
            .map(|(device, _)| device.socket.to_str().unwrap())
            .collect();
        assert_eq!(sockets, ["a", "b"]);
        assert_eq!(both.devices[0].1.network, "default");
        assert_eq!(both.devices[1].1.network, "n");
    }

    #[test]
    fn the_process_has_a_time_to_end() {
        let device = "[[device]]\nsocket = 'a'\n";
        let of = |cli: &[&str], file: &str| config(cli, &format!("{file}\n{device}"));
        assert_eq!(of(&[], "").unwrap().drain, USUAL_DRAIN);
        assert_eq!(of(&[], "drain = 7").unwrap().drain.as_secs(), 7);
        assert_eq!(of(&[], "drain = 0.5").unwrap().drain.as_millis(), 500);
        let both = of(&["--drain", "0"], "drain = 7").unwrap();
        assert_eq!(both.drain, Duration::ZERO);
        for bad in ["-1", "3601", "nan", "inf"] {
            let said = of(&[], &format!("drain = {bad}")).unwrap_err();
            assert!(said.contains("there must be 0 to 3600"), "{said}");
        }
    }

    #[test]
    fn sockets_have_an_owner_a_group_and_permissions() {
        let cli = [
            "--socket-path",
            "a",
            "--socket-mode",
            "0660",
            "--socket-owner",
            "7",
        ];
        let given = config(&cli, "socket-mode = '600'\nsocket-group = 'root'").unwrap();
        let access = Access {
            mode: Some(0o660),
            owner: Some(7),
            group: Some(0),
        };
        assert_eq!(given.access, access);
        assert_eq!(
            config(&["--socket-path", "a"], "").unwrap().access,
            Access::default()
        );
        for bad in [
            "socket-mode = '0668'",
            "socket-mode = '01777'",
            "socket-mode = '+660'",
            "socket-owner = 'nobody of this name'",
            "socket-group = 'nobody of this name'",
        ] {
            assert!(config(&["--socket-path", "a"], bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_sandbox_is_on_unless_it_is_told_otherwise() {
        let of = |cli: &[&str], file: &str| config(cli, file).unwrap().sandbox;
        let device = "[[device]]\nsocket = '/run/x/a'\n";
        let usual = of(
            &["--socket-path", "b", "--status-socket", "/run/y/s"],
            device,
        );
        assert_eq!(usual.mode, Mode::On);
        assert_eq!(usual.user, None);
        let directories = usual.directories.iter().map(|path| path.to_str().unwrap());
        assert_eq!(directories.collect::<Vec<_>>(), ["/run/x", ".", "/run/y"]);
        assert!(usual.descriptors >= 2 * DESCRIPTORS_EACH);
        assert_ne!(usual.more_descriptors, 0);
        let told = format!("sandbox = 'log'\nuser = '17'\n{device}");
        let logs = of(&[], &told);
        assert_eq!((logs.mode, logs.user), (Mode::Log, Identity::named("17")));
        assert_eq!(logs.more_descriptors, 0, "no device can come");
        let off = of(&["--sandbox", "off", "--user", "18"], &told);
        assert_eq!((off.mode, off.user), (Mode::Off, Identity::named("18")));
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(config(&[], "").is_err());
        assert!(config(&["--socket-path", "a", "--socket-path", "a"], "").is_err());
        assert!(config(&["--socket-path", "a", "--workers", "0"], "").is_err());
        assert!(config(&["--socket-path", "a", "--workers", "9"], "").is_err());
        assert!(config(&["--socket-path", "a,completion-queues=33"], "").is_err());
        assert!(config(&["--socket-path", "a,completion-queues=0"], "").is_err());
        assert!(config(&["--socket-path", "a", "--poll-us", "99999999999"], "").is_err());
        assert!(config(&["--socket-path", "a"], "wrokers = 1").is_err());
        assert!(config(&["--socket-path", "a", "--sandbox", "perhaps"], "").is_err());
        assert!(config(&["--socket-path", "a", "--user", "no such user"], "").is_err());
        assert!(config(
            &["--socket-path", "a"],
            "[[device]]\nsocket = 'b'\nmac = 'x'"
        )
        .is_err());
    }

    #[test]
    fn documentation_names_every_option_and_its_example_is_valid() {
        use clap::CommandFactory;
        let readme = include_str!("../README.md");
        let manual = include_str!("../vhost-device-rdma.1").replace("\\-", "-");
        for command in Args::command().get_subcommands() {
            let name = format!("vhost-device-rdma {}", command.get_name());
            assert!(manual.contains(&name), "{name} in the manual page");
            assert!(readme.contains(&name), "{name} in the README");
        }
        for arg in Args::command().get_arguments() {
            let option = format!("--{}", arg.get_long().unwrap());
            assert!(manual.contains(&option), "{option} in the manual page");
            assert!(
                readme.contains(&option) || ["--help", "--version"].contains(&&*option),
                "{option} in the README"
            );
        }
        let (_, example) = readme.split_once("```toml\n").unwrap();
        let (example, _) = example.split_once("```").unwrap();
        let example = config(&[], example).unwrap();
        assert_eq!(example.devices.len(), 2);
        assert_eq!(example.devices[1].1.completion_queues, 2);
        assert_eq!(example.devices[0].1.limits.qps, 4096);
        assert_eq!(example.devices[1].1.gid_policy.gids, Gids::Mac);
        assert!(example.devices[0].1.uplink.is_some());
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
        let args = Args::try_parse_from(["vhost-device-rdma", "status", "p", "--pretty"]).unwrap();
        assert!(matches!(
            args.command,
            Some(Command::Status { pretty: true, .. })
        ));
        let args = ["vhost-device-rdma", "link", "p", "d", "down"];
        let state = LinkState::Down;
        assert!(matches!(
            Args::try_parse_from(args).unwrap().command,
            Some(Command::Link { device, state: given, .. }) if device == "d" && given == state
        ));
    }
}
