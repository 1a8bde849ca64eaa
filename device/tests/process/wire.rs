// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VMs of two processes, as on two hosts, with VXLAN or plain frames between them.
use std::io::{BufRead, Read};
use std::net::UdpSocket;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vhost_device_rdma_bare::spec::ring::{SendWqe, Sge};
use vhost_device_rdma_bare::spec::verbs::{
    access, mtu, qp_state, qp_type, send_flag, wc_status, wr_opcode,
};
use vhost_device_rdma_bare::{
    Address, Connection, DeviceProcess, ProcessOptions, QpOptions, Vm, VmOptions,
};

use crate::common::{
    assert_footprint_falls_to, assert_status, assert_success, everything, footprint, is_root,
    pattern, Pair, Side, SideOptions, Two, NOTHING, TIMEOUT,
};

const QKEY: u32 = 0x1111_1111;
const GRH: usize = 40;

/// The GID of the VM at a host, 10.0.0.1 or 10.0.0.2.
fn gid(host: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, host]);
    gid
}

/// The same over IPv6, fd00::1 or fd00::2.
fn gid_ipv6(host: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    (gid[0], gid[15]) = (0xfd, host);
    gid
}

/// Two hosts, with a VM each.
struct Hosts {
    // Dropped first.
    vms: [Arc<Vm>; 2],
    processes: Vec<DeviceProcess>,
    directory: Directory,
}

/// A directory of its own, which goes when it is dropped.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Self {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("wire-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// UDP addresses of this host that nobody uses.
fn free() -> [String; 2] {
    let sockets = [0, 1].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
    sockets.map(|socket| socket.local_addr().unwrap().to_string())
}

impl Hosts {
    fn new() -> Self {
        Self::with_vnis([7, 7])
    }

    /// With VXLAN between them, and these network identifiers.
    fn with_vnis(vnis: [u32; 2]) -> Self {
        Self::with_vxlan(vnis, "10.0.0.", "/32", gid)
    }

    /// With VXLAN between them, and VMs whose GIDs are so.
    fn with_vxlan(vnis: [u32; 2], prefix: &str, suffix: &str, gid: fn(u8) -> [u8; 16]) -> Self {
        let addresses = free();
        let mut hosts = String::new();
        for (host, address) in (1..).zip(&addresses) {
            hosts += &format!(
                "[[wire.host]]\naddress = '{address}'\ngids = ['{prefix}{host}{suffix}']\n"
            );
        }
        let of = |host: usize| {
            let process = format!("[wire]\naddress = '{}'\n{hosts}", addresses[host]);
            (process, format!("vni = {}", vnis[host]))
        };
        Self::start([0, 1].map(of), gid)
    }

    /// With frames in datagrams from one to the other.
    fn with_frames() -> Self {
        Self::with_frames_and("")
    }

    /// The same, with more lines for the processes.
    fn with_frames_and(of_process: &str) -> Self {
        let addresses = free();
        let of = |host: usize| {
            let (local, remote) = (&addresses[host], &addresses[1 - host]);
            let dgram = format!("dgram = {{ local = '{local}', remote = '{remote}' }}");
            (of_process.to_owned(), dgram)
        };
        Self::start([0, 1].map(of), gid)
    }

    /// With interfaces of IP packets of `mtu` bytes in a bridge, in a network namespace that is the
    /// calling thread's from now on.
    fn with_bridge(mtu: u32) -> Self {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        let mut commands = vec![
            "link add br0 type bridge".to_owned(),
            "link set br0 up".into(),
        ];
        for vm in ["vm1", "vm2"] {
            // The other end stands for what QEMU has open.
            commands.extend([
                format!("link add {vm} type veth peer name {vm}-guest"),
                format!("link set {vm} mtu {mtu} master br0 up"),
                format!("link set {vm}-guest up"),
            ]);
        }
        for command in commands {
            let ip = Command::new("ip")
                .args(command.split(' '))
                .output()
                .unwrap();
            assert!(ip.status.success(), "{command}: {ip:?}");
        }
        let of = |host| (String::new(), format!("netdev = 'vm{host}'"));
        Self::start([1, 2].map(of), gid)
    }

    /// With these lines for the processes and for their devices, and VMs whose GIDs are so.
    fn start(lines: [(String, String); 2], gid: fn(u8) -> [u8; 16]) -> Self {
        let directory = Directory::new();
        let mut processes = Vec::new();
        for (host, (of_process, of_device)) in (1..).zip(lines) {
            let socket = directory.0.join(format!("vm{host}"));
            let file = directory.0.join(format!("{host}.toml"));
            let text = format!(
                "{of_process}\
                 [[device]]\nsocket = '{}'\nmac = '52:54:00:00:01:0{host}'\n{of_device}\n",
                socket.display()
            );
            std::fs::write(&file, text).unwrap();
            let options = ProcessOptions::vms(0).binary(env!("CARGO_BIN_EXE_vhost-device-rdma"));
            let arguments = ["--config", file.to_str().unwrap()];
            processes.push(DeviceProcess::start(&options.arguments(&arguments)).unwrap());
        }
        let vms = [1, 2].map(|host: u8| {
            let options = VmOptions {
                gid: Some(gid(host)),
                ..everything()
            };
            Vm::connect(&directory.0.join(format!("vm{host}")), options).unwrap()
        });
        Self {
            vms,
            processes,
            directory,
        }
    }

    fn socket(&self, host: u8) -> PathBuf {
        self.directory.0.join(format!("vm{host}"))
    }

    fn pair(&self, of: u8, change: impl Fn(&mut Connection)) -> Pair {
        let [a, b] = &self.vms;
        let options = SideOptions {
            qp: QpOptions::of(of),
            ..SideOptions::default()
        };
        Pair::connect(a, b, &options, |connection| {
            connection.path_mtu = mtu::MTU_1024;
            change(connection);
        })
    }

    fn assert_unharmed(&mut self) {
        for process in &mut self.processes {
            assert!(process.is_alive(), "{}", process.log());
            assert!(!process.log().contains("panic"), "{}", process.log());
        }
    }
}

fn wqe(opcode: u8, wr_id: u64, pair: &Pair) -> SendWqe {
    SendWqe {
        opcode,
        wr_id,
        flags: send_flag::SIGNALED,
        remote_addr: pair.b.mr.iova,
        rkey: pair.b.mr.rkey,
        ..SendWqe::default()
    }
}

fn sge(side: &Side, len: usize) -> [Sge; 1] {
    [side.mr.sge(0, len as u32)]
}

/// A message of each kind gets through, and its bytes.
fn assert_works(pair: &Pair, len: usize) {
    let (a, b) = (&pair.a, &pair.b);
    let data = pattern(len as u64, len);
    a.mr.write(0, &data);
    a.qp.post_send(&wqe(wr_opcode::RDMA_WRITE, 1, pair), &sge(a, len))
        .unwrap();
    assert_success(&a.sent());
    assert_eq!(b.mr.read(0, len), data);
    b.mr.write(0, &vec![0; len]);
    b.qp.post_recv(2, &sge(b, len)).unwrap();
    a.qp.post_send(&wqe(wr_opcode::SEND, 3, pair), &sge(a, len))
        .unwrap();
    assert_success(&a.sent());
    assert_success(&b.received());
    assert_eq!(b.mr.read(0, len), data);
    let other = pattern(len as u64 + 1, len);
    b.mr.write(0, &other);
    a.qp.post_send(&wqe(wr_opcode::RDMA_READ, 4, pair), &sge(a, len))
        .unwrap();
    assert_success(&a.sent());
    assert_eq!(a.mr.read(0, len), other);
}

// D-WIRE-003, D-WIRE-007.
#[test]
fn messages_go_from_host_to_host() {
    let mut hosts = Hosts::new();
    let pair = hosts.pair(qp_type::RC, |_| {});
    for len in [1, 1024, 1025, 70_000, 1 << 20] {
        assert_works(&pair, len);
    }
    hosts.assert_unharmed();
}

/// What a file says of a frame happens before that frame goes on, each time.
#[test]
fn a_file_says_what_happens_at_a_frame() {
    const FRAME: u64 = 10;
    const TRIES: usize = 20;
    let hosts = Hosts::with_frames();
    let socket = hosts.socket(1);
    let play = |number: u32| {
        let file = hosts.directory.0.join("play.toml");
        let text = format!(
            "[[step]]\nat = 'frame {FRAME}'\ndevice = '{device}'\nqp = {number}\n\
             [[step]]\nat = '1ms'\ndevice = '{device}'\nfaults = 'seed=1'\ndirection = 'in'\n",
            device = socket.display(),
        );
        std::fs::write(&file, text).unwrap();
        Command::new(env!("CARGO_BIN_EXE_vhost-device-rdma"))
            .arg("play")
            .args([hosts.processes[0].status_socket(), file])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let again = || {
        let status = hosts.processes[0].status().unwrap();
        status["workers"][0]["wire"]["sent_again"].as_u64().unwrap()
    };
    let mut exact = 0;
    for _ in 0..TRIES {
        let before = again();
        let pair = hosts.pair(qp_type::RC, |_| {});
        let mut play = play(pair.a.qp.number());
        let mut told = std::io::BufReader::new(play.stdout.take().unwrap());
        let mut line = String::new();
        // Frames are counted by then.
        told.read_line(&mut line).unwrap();
        assert!(line.contains("step 2"), "{line}");
        let mut done = 0;
        loop {
            let wqe = wqe(wr_opcode::RDMA_WRITE, done, &pair);
            pair.a.qp.post_send(&wqe, &sge(&pair.a, 8)).unwrap();
            let cqe = pair.a.sent();
            if cqe.status == wc_status::WR_FLUSH_ERR {
                break;
            }
            assert_success(&cqe);
            done += 1;
        }
        line.clear();
        told.read_line(&mut line).unwrap();
        assert!(line.contains("step 1"), "{line}");
        assert!(play.wait().unwrap().success());
        // Each message is one frame, and so is one that went again since its answer came late.
        let repeated = again() - before;
        assert!(
            done <= FRAME && done + repeated >= FRAME,
            "{done} messages, {repeated} again"
        );
        exact += u32::from(done == FRAME);
        if exact == 2 {
            return;
        }
        // Frames count from 0 again.
        let name = socket.display();
        let off = format!("faults {name} both off\n");
        hosts.processes[0].request(off.as_bytes()).unwrap();
    }
    panic!("each time something went again");
}

#[test]
fn messages_go_from_host_to_host_over_ipv6() {
    let mut hosts = Hosts::with_vxlan([7; 2], "fd00::", "/128", gid_ipv6);
    let pair = hosts.pair(qp_type::RC, |_| {});
    for len in [1, 1025, 1 << 20] {
        assert_works(&pair, len);
    }
    let datagrams = [0, 1].map(|host: usize| datagram_side(&hosts.vms[host]));
    let [a, b] = &datagrams;
    let wqe = Address::of(&b.qp, QKEY).send(1);
    a.qp.post_send(&wqe, &[a.mr.sge(4096, 100)]).unwrap();
    assert_success(&a.sent());
    let cqe = b.recv_cq.wait(TIMEOUT).expect("a datagram");
    assert_success(&cqe);
    let from_to = [gid_ipv6(1), gid_ipv6(2)].concat();
    assert_eq!(b.mr.read(8, 32), from_to, "its GRH");
    hosts.assert_unharmed();
}

/// An interface cuts bursts where its kernel must; long READs of scattered memory are the most that
/// comes at once.
#[test]
fn messages_go_from_interface_to_interface() {
    if !is_root() {
        return;
    }
    for mtu in [1500, 9000] {
        let mut hosts = Hosts::with_bridge(mtu);
        let mut qp = QpOptions::of(qp_type::RC);
        qp.caps.max_send_sge = 32;
        let options = SideOptions {
            qp,
            ..SideOptions::default()
        };
        let [a, b] = &hosts.vms;
        let pair = Pair::connect(a, b, &options, |connection| {
            connection.path_mtu = match mtu {
                1500 => mtu::MTU_1024,
                _ => mtu::MTU_4096,
            };
        });
        for len in [1, 1024, 1025, 70_000, 1 << 20] {
            assert_works(&pair, len);
        }
        let (a, b) = (&pair.a, &pair.b);
        let data = pattern(3, 1 << 20);
        b.mr.write(0, &data);
        for round in 0..5 {
            a.mr.write(0, &vec![0; 1 << 20]);
            for part in 0..8u64 {
                let sges: Vec<_> = (0..32)
                    .map(|page| a.mr.sge(part << 17 | page << 12, 4096))
                    .collect();
                let read = SendWqe {
                    remote_addr: b.mr.iova + (part << 17),
                    ..wqe(wr_opcode::RDMA_READ, part, &pair)
                };
                a.qp.post_send(&read, &sges).unwrap();
            }
            for part in 0..8 {
                let cqe = a.sent();
                assert_success(&cqe);
                assert_eq!(cqe.wr_id, part, "round {round}");
            }
            assert!(a.mr.read(0, 1 << 20) == data);
        }
        hosts.assert_unharmed();
    }
}

#[test]
fn messages_go_from_switch_port_to_switch_port() {
    let mut hosts = Hosts::with_frames();
    let pair = hosts.pair(qp_type::RC, |_| {});
    for len in [1, 1025, 1 << 20] {
        assert_works(&pair, len);
    }
    hosts.assert_unharmed();
}

#[test]
fn what_goes_over_the_wire_is_counted_and_why_frames_are_dropped() {
    let hosts = Hosts::new();
    let pair = hosts.pair(qp_type::RC, |_| {});
    assert_works(&pair, 5000);
    let wires = hosts.processes.iter().map(|process| {
        let status = process.status().unwrap();
        status["workers"][0]["wire"].clone()
    });
    let [a, b] = wires.collect::<Vec<_>>().try_into().unwrap();
    let number = |wire: &serde_json::Value, name: &str| wire[name].as_u64().unwrap();
    // Five packets each of WRITE, SEND and READ, and what acknowledges and asks.
    assert!(number(&a, "sent_frames") >= 11, "{a}");
    assert!(number(&a, "sent_bytes") >= 10_000, "{a}");
    assert!(number(&b, "sent_frames") >= 6, "{b}");
    assert!(number(&b, "received_frames") <= number(&a, "sent_frames"));
    assert_eq!(number(&a["dropped"], "icrc_wrong"), 0);
    // Others drop what is for nobody.
    let pair = hosts.pair(qp_type::RC, |connection| {
        connection.timeout = 8;
        connection.retry_cnt = 1;
    });
    pair.b.qp.set_state(qp_state::RESET).unwrap();
    pair.a
        .qp
        .post_send(&wqe(wr_opcode::RDMA_WRITE, 1, &pair), &sge(&pair.a, 8))
        .unwrap();
    assert_status(&pair.a.sent(), wc_status::RETRY_EXC_ERR);
    let status = hosts.processes[1].status().unwrap();
    let dropped = &status["workers"][0]["wire"]["dropped"];
    assert_eq!(number(dropped, "stranger"), 2, "{dropped}");
}

/// Starts `capture` of a process. What it writes comes from its standard output.
fn capture(process: &DeviceProcess, more: &[&str]) -> std::process::Child {
    Command::new(env!("CARGO_BIN_EXE_vhost-device-rdma"))
        .arg("capture")
        .arg(process.status_socket())
        .args(more)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Reads until it has come to this.
fn read_to(capture: &mut std::process::Child, wanted: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut space = [0; 4096];
    let out = capture.stdout.as_mut().unwrap();
    while !bytes.windows(wanted.len()).any(|window| window == wanted) {
        let count = out.read(&mut space).unwrap();
        assert_ne!(count, 0, "the capture ends after {} bytes", bytes.len());
        bytes.extend_from_slice(&space[..count]);
    }
    bytes
}

#[test]
fn what_goes_over_the_wire_is_captured_with_the_reasons() {
    let hosts = Hosts::new();
    let process = &hosts.processes[1];
    let mut first = capture(process, &["--snap", "100"]);
    // The head of a file for Wireshark.
    read_to(&mut first, &[0x4d, 0x3c, 0x2b, 0x1a]);
    // One at a time; the status is told meanwhile.
    let second = capture(process, &[]).wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(said.contains("somebody captures already"), "{said}");
    assert!(!second.status.success());
    assert!(process.status().is_ok());
    let pair = hosts.pair(qp_type::RC, |connection| {
        connection.access = access::REMOTE_READ
    });
    pair.a
        .qp
        .post_send(&wqe(wr_opcode::RDMA_WRITE, 1, &pair), &sge(&pair.a, 8))
        .unwrap();
    assert_status(&pair.a.sent(), wc_status::REM_INV_REQ_ERR);
    let bytes = read_to(&mut first, b"NAK at PSN ");
    assert!(bytes.windows(5).any(|window| window == b"vni 7"));
    first.kill().unwrap();
    first.wait().unwrap();
    // The next one may at once, of one VM alone.
    let mut third = capture(process, &["--vm", "52:54:00:00:01:02"]);
    read_to(&mut third, &[0x4d, 0x3c, 0x2b, 0x1a]);
    third.kill().unwrap();
    third.wait().unwrap();
    let nobody = capture(process, &["--vm", "nobody"])
        .wait_with_output()
        .unwrap();
    let said = String::from_utf8_lossy(&nobody.stderr).into_owned();
    assert!(said.contains("there is no device 'nobody'"), "{said}");
}

/// Runs `faults` for the VM of a host; returns what it says against it, or nothing.
fn faults(process: &DeviceProcess, host: u8, words: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_vhost-device-rdma"))
        .arg("faults")
        .arg(process.status_socket())
        .arg(format!("52:54:00:00:01:0{host}"))
        .args(words)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.success(), said.is_empty());
    said
}

/// What faults of a process did, by the name of the count.
fn suffered(process: &DeviceProcess, direction: &str, name: &str) -> u64 {
    let status = process.status().unwrap();
    let list = status["workers"][0]["wire"]["faults"].as_array().unwrap();
    let one = list.iter().find(|one| one["direction"] == direction);
    one.unwrap()["counts"][name].as_u64().unwrap()
}

#[test]
fn frames_are_lost_and_delayed_as_an_operator_says() {
    let mut hosts = Hosts::new();
    let pair = hosts.pair(qp_type::RC, |connection| {
        connection.timeout = 14;
        connection.retry_cnt = 7;
    });
    let process = &hosts.processes[0];
    // Any frame may be lost, and all gets there.
    let some = "seed=3,loss=5%,burst=2,damage=1%,duplicate=2%,reorder=5%,reorder-time=200us";
    assert_eq!(faults(process, 1, &[some]), "");
    for len in [1, 1025, 200_000] {
        assert_works(&pair, len);
    }
    assert!(suffered(process, "out", "lost") > 0 && suffered(process, "in", "lost") > 0);
    let status = process.status().unwrap();
    let dropped = status["workers"][0]["wire"]["dropped"]["faults"].as_u64();
    assert_eq!(dropped, Some(suffered(process, "in", "lost")));
    // These frames, and in one direction.
    assert_eq!(faults(process, 1, &["off"]), "");
    assert_eq!(faults(process, 1, &["lose=0..1", "--direction", "out"]), "");
    assert_works(&pair, 100);
    assert_eq!(suffered(process, "out", "lost"), 2);
    // As long as was said, there and back. A worker that sleeps wakes for it.
    assert_eq!(faults(process, 1, &["delay=30ms"]), "");
    let start = Instant::now();
    assert_works(&pair, 8);
    assert!(start.elapsed() >= Duration::from_millis(3 * 60));
    // A cut ends messages, and no more than that.
    assert_eq!(faults(process, 1, &["loss=100%", "--direction", "in"]), "");
    let other = hosts.pair(qp_type::RC, |connection| {
        connection.timeout = 8;
        connection.retry_cnt = 1;
    });
    let write = wqe(wr_opcode::RDMA_WRITE, 1, &other);
    other.a.qp.post_send(&write, &sge(&other.a, 8)).unwrap();
    assert_status(&other.a.sent(), wc_status::RETRY_EXC_ERR);
    assert_eq!(faults(process, 1, &["off"]), "");
    assert_works(&pair, 5000);
    hosts.assert_unharmed();
}

#[test]
fn faults_may_be_there_from_the_start() {
    let addresses = free();
    let of = |host: usize| {
        let (local, remote) = (&addresses[host], &addresses[1 - host]);
        let dgram = format!("dgram = {{ local = '{local}', remote = '{remote}' }}");
        let faults = ["faults = { in = 'lose=0' }", "faults = 'lose=1'"][host];
        (String::new(), format!("{dgram}\n{faults}"))
    };
    let hosts = Hosts::start([0, 1].map(of), gid);
    let pair = hosts.pair(qp_type::RC, |connection| connection.timeout = 14);
    assert_works(&pair, 3000);
    assert_eq!(suffered(&hosts.processes[0], "in", "lost"), 1);
    assert_eq!(suffered(&hosts.processes[1], "in", "lost"), 1);
    assert_eq!(suffered(&hosts.processes[1], "out", "lost"), 1);
}

#[test]
fn faults_that_there_cannot_be_are_refused_in_a_sentence() {
    let hosts = Hosts::new();
    let said = faults(&hosts.processes[0], 1, &["loss=200%"]);
    assert!(said.contains("'200%' of loss is not a part"), "{said}");
    let said = faults(&hosts.processes[0], 9, &["loss=1%"]);
    assert!(
        said.contains("there is no device '52:54:00:00:01:09'"),
        "{said}"
    );
    for (request, answer) in [
        ("faults x sideways off\n", "there is no device 'x'"),
        ("faults 52:54:00:00:01:01 sideways off\n", "not 'sideways'"),
        ("faults 52:54:00:00:01:01 in lost\n", "'lost' is no fault"),
        ("faults off\n", "the request is: faults DEVICE"),
    ] {
        let said = hosts.processes[0].request(request.as_bytes()).unwrap();
        assert!(said.to_string().contains(answer), "{said}");
    }
    // Without a way out there are no frames.
    let process = crate::common::process(1);
    let request = "faults 52:54:00:00:00:01 both loss=1%\n";
    let said = process.request(request.as_bytes()).unwrap().to_string();
    assert!(said.contains("only frames have faults"), "{said}");
}

/// A switch with two ports: what comes at one goes out at the other, until it is dropped.
struct Hub {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<usize>>,
}

impl Hub {
    /// One between two devices. Returns what their configuration says of it, too.
    fn start() -> (Self, [String; 2]) {
        let ports = [0, 1].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
        let devices = free();
        for (port, device) in ports.iter().zip(&devices) {
            port.connect(device).unwrap();
            port.set_nonblocking(true).unwrap();
        }
        let lines = [0, 1].map(|at: usize| {
            let (local, remote) = (&devices[at], ports[at].local_addr().unwrap());
            format!("dgram = {{ local = '{local}', remote = '{remote}' }}")
        });
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let (mut bytes, mut count) = ([0; 2048], 0);
            while !stopped.load(Ordering::SeqCst) {
                let mut idle = true;
                for at in [0, 1] {
                    while let Ok(len) = ports[at].recv(&mut bytes) {
                        let _ = ports[1 - at].send(&bytes[..len]);
                        count += 1;
                        idle = false;
                    }
                }
                if idle {
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
            count
        });
        let thread = Some(thread);
        (Self { stop, thread }, lines)
    }

    /// How many frames it has forwarded in all.
    fn end(mut self) -> usize {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
    }
}

/// Both VMs have the same process, with a switch between them; `line` is of both devices.
fn at_a_switch(line: &str) -> (Hub, Hosts) {
    let (hub, ways) = Hub::start();
    let ways = ways.map(|way| format!("{way}\n{line}"));
    (hub, of_one_process("", &ways))
}

/// Both VMs have the same process, with these lines for it and for each device.
fn of_one_process(of_process: &str, of_devices: &[String; 2]) -> Hosts {
    let directory = Directory::new();
    let socket = |host: usize| directory.0.join(format!("vm{host}"));
    let mut text = of_process.to_owned();
    for (host, of_device) in (1..).zip(of_devices) {
        let socket = socket(host);
        text += &format!(
            "[[device]]\nsocket = '{}'\nmac = '52:54:00:00:01:0{host}'\n{of_device}\n",
            socket.display()
        );
    }
    let file = directory.0.join("1.toml");
    std::fs::write(&file, text).unwrap();
    let options = ProcessOptions::vms(0).binary(env!("CARGO_BIN_EXE_vhost-device-rdma"));
    let arguments = ["--config", file.to_str().unwrap()];
    let process = DeviceProcess::start(&options.arguments(&arguments)).unwrap();
    let vms = [1, 2].map(|host: u8| {
        let options = VmOptions {
            gid: Some(gid(host)),
            ..everything()
        };
        Vm::connect(&socket(host.into()), options).unwrap()
    });
    Hosts {
        vms,
        processes: vec![process],
        directory,
    }
}

/// Both VMs have the same process, whose tunnel leads to itself; `line` is of both devices.
fn in_a_tunnel(line: &str) -> Hosts {
    let [address, _] = free();
    let of_process = format!(
        "[wire]\naddress = '{address}'\n\
         [[wire.host]]\naddress = '{address}'\ngids = ['10.0.0.0/24']\n"
    );
    let of_device = format!("vni = 7\n{line}");
    of_one_process(&of_process, &[of_device.clone(), of_device])
}

#[test]
fn vms_of_a_process_meet_in_vxlan_if_they_are_to() {
    let mut hosts = in_a_tunnel("local = false\nfaults = 'loss=1%'");
    let pair = hosts.pair(qp_type::RC, |connection| connection.timeout = 14);
    assert_works(&pair, 100_000);
    let status = hosts.processes[0].status().unwrap();
    let wire = &status["workers"][0]["wire"];
    assert!(wire["received_frames"].as_u64().unwrap() > 300, "{wire}");
    hosts.assert_unharmed();
}

/// Even messages of a VM to itself go out, where they come back.
#[test]
fn a_vm_meets_itself_in_vxlan_if_it_is_to() {
    for (local, outside) in [("false", false), ("'nothing'", true)] {
        let mut hosts = in_a_tunnel(&format!("local = {local}"));
        let [vm, _] = &hosts.vms;
        let options = SideOptions::default();
        let pair = Pair::connect(vm, vm, &options, |connection| {
            connection.path_mtu = mtu::MTU_1024;
        });
        assert_works(&pair, 70_000);
        let status = hosts.processes[0].status().unwrap();
        let wire = &status["workers"][0]["wire"];
        let frames = wire["sent_frames"].as_u64().unwrap();
        assert_eq!(frames > 200, outside, "{wire}");
        hosts.assert_unharmed();
    }
}

#[test]
fn vms_of_a_process_meet_in_it_or_outside_as_is_said() {
    for (line, outside) in [("", false), ("local = false", true)] {
        let (hub, mut hosts) = at_a_switch(line);
        let pair = hosts.pair(qp_type::RC, |connection| connection.timeout = 14);
        assert_works(&pair, 5000);
        let sides = [0, 1].map(|host: usize| datagram_side(&hosts.vms[host]));
        let [a, b] = &sides;
        let wqe = Address::of(&b.qp, QKEY).send(1);
        a.qp.post_send(&wqe, &[a.mr.sge(4096, 100)]).unwrap();
        assert_success(&a.sent());
        assert_success(&b.recv_cq.wait(TIMEOUT).expect("a datagram"));
        hosts.assert_unharmed();
        // Five packets each of WRITE, SEND and READ, their answers, and a datagram.
        let forwarded = hub.end();
        assert_eq!(forwarded >= 19, outside, "{line}: {forwarded}");
    }
}

/// The switch brings what goes to a group to all ports, those of this process among them; so does a
/// tunnel to itself, where messages go out.
#[test]
fn what_goes_to_a_group_comes_once_to_vms_of_the_same_process() {
    let mut group = gid(0);
    group[12..].copy_from_slice(&[224, 0, 7, 7]);
    for (switched, line) in [
        (true, ""),
        (true, "local = false"),
        (false, "local = false"),
        (false, "local = 'nothing'"),
    ] {
        let (hub, hosts) = if switched {
            let (hub, hosts) = at_a_switch(line);
            (Some(hub), hosts)
        } else {
            (None, in_a_tunnel(line))
        };
        let sides = [0, 1].map(|host: usize| datagram_side(&hosts.vms[host]));
        for side in &sides {
            side.qp.attach(group).unwrap();
            side.qp.post_recv(10, &sge(side, 2048)).unwrap();
        }
        let [a, b] = &sides;
        let wqe = Address::group(group, QKEY).send(1);
        a.qp.post_send(&wqe, &[a.mr.sge(4096, 100)]).unwrap();
        assert_success(&a.sent());
        for side in [a, b] {
            let cqe = side.recv_cq.wait(TIMEOUT);
            assert_success(&cqe.unwrap_or_else(|_| panic!("no datagram: {line}, {switched}")));
        }
        std::thread::sleep(NOTHING);
        for side in [a, b] {
            assert!(side.recv_cq.poll().is_none(), "it came twice");
        }
        if let Some(hub) = hub {
            assert_eq!(hub.end(), 1, "{line}");
        }
    }
}

/// Messages of a process without a way out are captured as the packets that they would have been.
#[test]
fn what_stays_in_the_process_is_captured_too() {
    let two = Two::new();
    let pair = two.pair();
    assert_works(&pair, 3000);
    let mut child = capture(&two.process, &[]);
    read_to(&mut child, &[0x4d, 0x3c, 0x2b, 0x1a]);
    assert_works(&pair, 3000);
    let file = read_to(&mut child, b"local: not sent");
    assert!(file.windows(5).any(|bytes| bytes == b"local"));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_receive_that_comes_late_is_waited_for() {
    let hosts = Hosts::new();
    let pair = hosts.pair(qp_type::RC, |_| {});
    pair.a
        .qp
        .post_send(&wqe(wr_opcode::SEND, 1, &pair), &sge(&pair.a, 5000))
        .unwrap();
    pair.a.assert_quiet();
    pair.b.qp.post_recv(2, &sge(&pair.b, 5000)).unwrap();
    assert_success(&pair.a.sent());
    assert_success(&pair.b.received());
}

#[test]
fn a_key_that_gives_no_access_is_refused() {
    let hosts = Hosts::new();
    let pair = hosts.pair(qp_type::RC, |connection| {
        connection.access = access::REMOTE_READ
    });
    let before = pair.b.mr.read(0, 8);
    pair.a
        .qp
        .post_send(&wqe(wr_opcode::RDMA_WRITE, 1, &pair), &sge(&pair.a, 8))
        .unwrap();
    assert_status(&pair.a.sent(), wc_status::REM_INV_REQ_ERR);
    assert_eq!(pair.b.mr.read(0, 8), before);
}

// D-WIRE-006.
#[test]
fn masked_atomic_operations_have_no_packets() {
    let hosts = Hosts::new();
    let pair = hosts.pair(qp_type::RC, |_| {});
    let masked = wr_opcode::MASKED_ATOMIC_FETCH_AND_ADD;
    pair.a
        .qp
        .post_send(&wqe(masked, 1, &pair), &sge(&pair.a, 8))
        .unwrap();
    assert_status(&pair.a.sent(), wc_status::LOC_QP_OP_ERR);
}

#[test]
fn uc_messages_go_from_host_to_host() {
    let hosts = Hosts::new();
    let pair = hosts.pair(qp_type::UC, |_| {});
    let data = pattern(1, 5000);
    pair.a.mr.write(0, &data);
    pair.b.qp.post_recv(1, &sge(&pair.b, 5000)).unwrap();
    pair.a
        .qp
        .post_send(&wqe(wr_opcode::SEND, 2, &pair), &sge(&pair.a, 5000))
        .unwrap();
    assert_success(&pair.a.sent());
    assert_success(&pair.b.received());
    assert_eq!(pair.b.mr.read(0, 5000), data);
}

#[test]
fn nothing_is_kept_of_queue_pairs_that_are_gone() {
    let hosts = Hosts::new();
    let socket = hosts.socket(1);
    let process = &hosts.processes[0];
    let before = footprint(process, &socket);
    for _ in 0..3 {
        let pair = hosts.pair(qp_type::RC, |_| {});
        assert_works(&pair, 5000);
        assert!(footprint(process, &socket) > before);
        drop(pair);
        assert_footprint_falls_to(process, &socket, before);
    }
}

/// A UD queue pair that is ready, with a receive.
fn datagram_side(vm: &Arc<Vm>) -> Side {
    let options = SideOptions {
        qp: QpOptions::of(qp_type::UD),
        ..SideOptions::default()
    };
    let side = Side::new(vm, &options);
    side.qp.connect(&Connection::datagram(QKEY)).unwrap();
    side.qp.post_recv(9, &sge(&side, 2048)).unwrap();
    side
}

#[test]
fn datagrams_go_from_host_to_host_and_to_groups() {
    let mut group = gid(0);
    group[12..].copy_from_slice(&[224, 0, 7, 7]);
    let hosts = Hosts::new();
    let [a, b] = [0, 1].map(|host: usize| datagram_side(&hosts.vms[host]));
    b.qp.attach(group).unwrap();
    let data = pattern(3, 100);
    for address in [Address::of(&b.qp, QKEY), Address::group(group, QKEY)] {
        a.mr.write(4096, &data);
        let wqe = address.send(1);
        a.qp.post_send(&wqe, &[a.mr.sge(4096, 100)]).unwrap();
        assert_success(&a.sent());
        let cqe = b.recv_cq.wait(TIMEOUT).expect("a datagram");
        assert_success(&cqe);
        assert_eq!((cqe.src_qp, cqe.byte_len), (a.qp.number(), 140));
        assert_eq!(b.mr.read(GRH, 100), data);
        b.qp.post_recv(9, &sge(&b, 2048)).unwrap();
    }
}

/// An SRD queue pair that is ready.
fn reliable_side(vm: &Arc<Vm>) -> Side {
    let options = SideOptions {
        qp: QpOptions::of(qp_type::SRD),
        cqe: 4096,
        ..SideOptions::default()
    };
    let side = Side::new(vm, &options);
    side.qp
        .connect(&Connection::reliable_datagram(QKEY))
        .unwrap();
    side
}

// D-SRD-020.
/// All kinds of reliable datagrams get through, and their bytes, also where packets are lost, or all
/// of a path.
#[test]
fn reliable_datagrams_go_from_host_to_host() {
    let mut hosts = Hosts::new();
    let [a, b] = [0, 1].map(|host: usize| reliable_side(&hosts.vms[host]));
    let to = Address::of(&b.qp, QKEY);
    let range = (b.mr.iova, b.mr.rkey);
    for loss in ["off", "seed=1,loss=5%", "seed=1,loss=100%,path=1"] {
        for (host, process) in (1..).zip(&hosts.processes) {
            faults(process, host, &[loss]);
        }
        for len in [0, 1, 1024, 1025, 300_000, 1 << 20] {
            let data = pattern(len as u64 + 1, len);
            a.mr.write(0, &data);
            let write = to.reliable(wr_opcode::RDMA_WRITE, 1, range);
            a.qp.post_send(&write, &sge(&a, len)).unwrap();
            assert_success(&a.sent());
            assert_eq!(b.mr.read(0, len), data);
            a.mr.write(0, &vec![0; len]);
            let read = to.reliable(wr_opcode::RDMA_READ, 2, range);
            a.qp.post_send(&read, &sge(&a, len)).unwrap();
            assert_success(&a.sent());
            assert_eq!(a.mr.read(0, len), data);
        }
        for n in 0..500u64 {
            b.qp.post_recv(n, &[b.mr.sge(0, 1024)]).unwrap();
            let send = to.reliable(wr_opcode::SEND, n, (0, 0));
            a.qp.post_send(&send, &sge(&a, 1000)).unwrap();
            assert_success(&a.sent());
            let cqe = b.received();
            assert_success(&cqe);
            assert_eq!((cqe.src_qp, cqe.byte_len), (a.qp.number(), 1000));
        }
    }
    hosts.assert_unharmed();
}

/// What is posted is acknowledged before the process ends, also where packets are lost.
#[test]
fn what_is_posted_goes_over_the_wire_before_the_process_ends() {
    const WRITES: u64 = 48;
    for reliable_datagrams in [false, true] {
        let mut hosts = Hosts::with_frames_and("drain = 15\n");
        let pair = if reliable_datagrams {
            let [a, b] = [0, 1].map(|host: usize| reliable_side(&hosts.vms[host]));
            Pair { a, b }
        } else {
            hosts.pair(qp_type::RC, |_| ())
        };
        let (a, b) = (&pair.a, &pair.b);
        faults(&hosts.processes[0], 1, &["seed=1,loss=0.1%"]);
        let to = Address::of(&b.qp, QKEY);
        for wr_id in 0..WRITES {
            let (opcode, sge) = (wr_opcode::RDMA_WRITE, sge(a, 1 << 20));
            let posted = if reliable_datagrams {
                let write = to.reliable(opcode, wr_id, (b.mr.iova, b.mr.rkey));
                a.qp.post_send(&write, &sge)
            } else {
                a.qp.post_send(&wqe(opcode, wr_id, &pair), &sge)
            };
            posted.unwrap();
        }
        let process = &mut hosts.processes[0];
        process.tell_to_end().unwrap();
        assert!(process.wait_for_end().unwrap(), "{}", process.log());
        for _ in 0..WRITES {
            assert_success(&a.send_cq.poll().expect("a completion"));
        }
        assert!(!process.log().contains("have not completed"));
        hosts.vms[0].kill();
    }
}

/// A host that is not there ends the messages to it, and keeps no others.
// D-SRD-019.
#[test]
fn reliable_datagrams_to_a_host_that_is_not_there_end_in_time() {
    let mut hosts = Hosts::new();
    let [a, b] = [0, 1].map(|host: usize| reliable_side(&hosts.vms[host]));
    let gone = Address {
        dgid: gid(9),
        ..Address::of(&b.qp, QKEY)
    };
    let range = (b.mr.iova, b.mr.rkey);
    let before = footprint(&hosts.processes[0], &hosts.socket(1));
    for n in 0..30 {
        let write = gone.reliable(wr_opcode::RDMA_WRITE, n, range);
        a.qp.post_send(&write, &sge(&a, 5000)).unwrap();
    }
    let own = Address::of(&a.qp, QKEY);
    let write = own.reliable(wr_opcode::RDMA_WRITE, 1000, (a.mr.iova, a.mr.rkey));
    a.qp.post_send(&write, &sge(&a, 5000)).unwrap();
    let cqe = a.sent();
    assert_success(&cqe);
    assert_eq!(cqe.wr_id, 1000);
    for _ in 0..30 {
        assert_status(&a.sent(), wc_status::RESP_TIMEOUT_ERR);
    }
    assert!(footprint(&hosts.processes[0], &hosts.socket(1)) > before);
    hosts.assert_unharmed();
}

// D-WIRE-002.
#[test]
fn networks_with_different_numbers_do_not_meet() {
    let hosts = Hosts::with_vnis([7, 8]);
    let pair = hosts.pair(qp_type::RC, |connection| {
        connection.timeout = 8;
        connection.retry_cnt = 1;
    });
    pair.a
        .qp
        .post_send(&wqe(wr_opcode::RDMA_WRITE, 1, &pair), &sge(&pair.a, 8))
        .unwrap();
    assert_status(&pair.a.sent(), wc_status::RETRY_EXC_ERR);
}

// D-STOP-003.
#[test]
fn a_vm_that_is_stopped_is_waited_for() {
    let hosts = Hosts::new();
    // It would be given up in no time.
    let pair = hosts.pair(qp_type::RC, |connection| {
        connection.timeout = 12;
        connection.retry_cnt = 1;
        connection.rnr_retry = 7;
    });
    assert_works(&pair, 100);
    for opcode in [wr_opcode::RDMA_WRITE, wr_opcode::RDMA_READ] {
        hosts.vms[1].stop().unwrap();
        pair.a
            .qp
            .post_send(&wqe(opcode, 1, &pair), &sge(&pair.a, 5000))
            .unwrap();
        pair.a.assert_quiet();
        hosts.vms[1].start().unwrap();
        assert_success(&pair.a.sent());
    }
}

// D-WIRE-004.
#[test]
fn a_host_that_goes_away_is_given_up_in_time() {
    let mut hosts = Hosts::new();
    let pair = hosts.pair(qp_type::RC, |connection| {
        // 67 ms: a host that is busy is not one that has gone.
        connection.timeout = 14;
        connection.retry_cnt = 2;
    });
    assert_works(&pair, 100);
    drop(hosts.processes.pop());
    std::thread::sleep(NOTHING);
    pair.a
        .qp
        .post_send(&wqe(wr_opcode::RDMA_WRITE, 1, &pair), &sge(&pair.a, 8))
        .unwrap();
    assert_status(&pair.a.sent(), wc_status::RETRY_EXC_ERR);
    let state = pair.a.qp.query().unwrap().qp_state;
    assert_eq!(state, qp_state::ERR);
}
