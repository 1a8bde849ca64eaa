// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Metrics: what is told, where, and to whom.
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use vhost_device_rdma_bare::spec::verbs::wc_status;
use vhost_device_rdma_bare::DeviceProcess;

use crate::common::{
    assert_status, assert_success, process_with, vm, Side, SideOptions, Two, TIMEOUT,
};

const BINARY: &str = env!("CARGO_BIN_EXE_vhost-device-rdma");
const DASHBOARD: &str = include_str!("../../../docs/grafana/vhost-device-rdma.json");
const DOCUMENT: &str = include_str!("../../../docs/metrics.md");
const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: there\r\nAccept: */*\r\n\r\n";

/// What a client that sends this is answered: the head, and what follows it.
fn ask(mut client: impl Read + Write, request: &[u8]) -> (String, String) {
    client.write_all(request).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

/// Values by their name with its labels, and kinds by name.
struct Told {
    values: BTreeMap<String, f64>,
    kinds: BTreeMap<String, String>,
}

impl Told {
    fn by(client: impl Read + Write) -> Self {
        let (head, body) = ask(client, GET);
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains("application/openmetrics-text; version=1.0.0"));
        assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())));
        assert!(body.ends_with("\n# EOF\n"));
        let (mut values, mut kinds) = (BTreeMap::new(), BTreeMap::new());
        for line in body.lines() {
            if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').unwrap();
                assert_eq!(kinds.insert(name.to_owned(), kind.to_owned()), None);
            } else if !line.starts_with('#') {
                let (name, value) = line.rsplit_once(' ').unwrap();
                let value = value.parse().unwrap();
                assert_eq!(values.insert(name.to_owned(), value), None, "{line}");
            }
        }
        Self { values, kinds }
    }

    /// A value of the process, or of the device at `socket`, with further labels.
    #[track_caller]
    fn of(&self, name: &str, socket: &Path, more: &str) -> f64 {
        let name = format!(
            "vhost_device_rdma_{name}{{device=\"{}\"{more}}}",
            socket.display()
        );
        let value = self.values.get(&name);
        *value.unwrap_or_else(|| panic!("{name} is not in {:?}", self.values))
    }
}

/// A process with two VMs, and the socket of its metrics.
fn two() -> (Two, PathBuf) {
    let directory = vmm_sys_util::tempdir::TempDir::new().unwrap();
    let path = directory.as_path().to_owned();
    // The process removes the socket, and somebody else the directory.
    std::mem::forget(directory);
    let socket = path.join("metrics");
    let two = Two::with(&["--workers", "1", "--metrics", socket.to_str().unwrap()]);
    (two, socket)
}

#[test]
fn what_vms_do_is_told() {
    let (two, socket) = two();
    let [a, b] = [0, 1].map(|vm| two.process.socket(vm).to_owned());
    let told = || Told::by(UnixStream::connect(&socket).unwrap());
    {
        let pair = two.pair();
        let rkey = pair.b.mr.rkey;
        let write = |key| {
            let to = pair.b.mr.iova;
            pair.a.qp.write(1, &[pair.a.mr.sge(0, 1000)], to, key)
        };
        for _ in 0..3 {
            write(rkey).unwrap();
            assert_success(&pair.a.sent());
        }
        let now = told();
        assert_eq!(now.of("sent_messages_total", &a, ""), 3.0);
        assert_eq!(now.of("sent_bytes_total", &a, ""), 3000.0);
        assert_eq!(now.of("received_bytes_total", &b, ""), 3000.0);
        assert_eq!(now.of("sent_messages_total", &b, ""), 0.0);
        let rts = ",type=\"RC\",state=\"RTS\"";
        assert_eq!(now.of("queue_pairs", &a, rts), 1.0);
        assert_eq!(now.of("objects", &a, ",kind=\"cqs\""), 2.0);
        assert_eq!(now.of("objects", &a, ",kind=\"mrs\""), 1.0);
        assert_eq!(now.of("device_attached", &a, ""), 1.0);
        assert_eq!(
            (now.of("link_up", &a, ""), now.of("port_up", &a, "")),
            (1.0, 1.0)
        );
        assert!(now.of("footprint_bytes", &a, "") > 0.0);
        assert!(now.of("footprint_bytes", &a, "") < now.of("footprint_limit_bytes", &a, ""));
        assert!(now.of("guest_memory_bytes", &a, "") > 0.0);
        let of_worker =
            |name: &str| now.values[&format!("vhost_device_rdma_{name}{{worker=\"0\"}}")];
        assert!(of_worker("worker_polls_total") > 0.0);
        assert!(of_worker("worker_cpu_seconds_total") >= 0.0);
        assert!(of_worker("worker_turn_seconds_count") >= 0.0);

        write(rkey ^ 0xff00).unwrap();
        assert_status(&pair.a.sent(), wc_status::REM_ACCESS_ERR);
        let now = told();
        let failed = |status: &str| {
            let label = format!(",status=\"{status}\"");
            now.of("failed_work_requests_total", &a, &label)
        };
        assert_eq!(failed("REM_ACCESS_ERR"), 1.0);
        assert_eq!(now.of("queue_pairs", &a, ",type=\"RC\",state=\"ERR\""), 1.0);
    }
    two.process.set_link(1, false).unwrap();
    let now = told();
    assert_eq!(
        (now.of("link_up", &b, ""), now.of("port_up", &b, "")),
        (0.0, 0.0)
    );
    assert_eq!(now.of("link_up", &a, ""), 1.0);
}

/// They are counted in pieces.
#[test]
fn many_queue_pairs_are_counted() {
    let (two, socket) = two();
    let options = SideOptions {
        memory: 4096,
        cqe: 1,
        ..SideOptions::default()
    };
    let sides: Vec<_> = (0..1100).map(|_| Side::new(&two.a, &options)).collect();
    let told = Told::by(UnixStream::connect(&socket).unwrap());
    let reset = ",type=\"RC\",state=\"RESET\"";
    let a = two.process.socket(0);
    assert_eq!(told.of("queue_pairs", a, reset), sides.len() as f64);
}

/// A device is told of before there is a VM and after it has gone, and its counters are the VM's.
#[test]
fn a_device_without_a_vm_is_told_of() {
    let process = process_with(1, &["--metrics", "127.0.0.1:0"]);
    let told = || Told::by(connect(&process));
    let attached = |told: &Told| told.of("device_attached", process.socket(0), "");
    assert_eq!(attached(&told()), 0.0);
    let guest = vm(process.socket(0));
    let now = told();
    assert_eq!(attached(&now), 1.0);
    assert_eq!(now.of("sent_messages_total", process.socket(0), ""), 0.0);
    drop(guest);
    let deadline = Instant::now() + TIMEOUT;
    while attached(&told()) != 0.0 {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(2));
    }
    let counter = "vhost_device_rdma_sent_messages_total";
    assert!(!told().values.keys().any(|name| name.starts_with(counter)));
}

/// Connects to the TCP port that the log of the process names.
fn connect(process: &DeviceProcess) -> TcpStream {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let log = process.log();
        let after = log.split_once("metrics are told at http://");
        if let Some((address, _)) = after.and_then(|(_, rest)| rest.split_once("/metrics")) {
            return TcpStream::connect(address).unwrap();
        }
        assert!(Instant::now() < deadline, "{log}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What docs/metrics.md says is what is told, and nothing else.
#[test]
fn all_metrics_are_documented() {
    let directory = vmm_sys_util::tempdir::TempDir::new().unwrap();
    let file = directory.as_path().join("config");
    // With a wire, there are more.
    let device = directory.as_path().join("vm");
    let unused = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = unused.local_addr().unwrap();
    drop(unused);
    let text = format!(
        "[wire]\naddress = '{address}'\n[[device]]\nsocket = '{}'\nvni = 7\n",
        device.display()
    );
    std::fs::write(&file, text).unwrap();
    let file = file.to_str().unwrap();
    let process = process_with(1, &["--config", file, "--metrics", "127.0.0.1:0"]);
    let told = Told::by(connect(&process));
    let kind = |line: &str| {
        let mut cells = line.strip_prefix("| `")?.split(" | ");
        let name = cells.next()?.strip_suffix('`')?;
        Some((
            format!("vhost_device_rdma_{name}"),
            cells.next()?.to_owned(),
        ))
    };
    let documented: BTreeSet<_> = DOCUMENT.lines().filter_map(kind).collect();
    assert_eq!(told.kinds.into_iter().collect::<BTreeSet<_>>(), documented);
}

/// The dashboard asks for what there is, by the labels that it has.
#[test]
fn the_dashboard_shows_what_is_documented() {
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    let mut names = BTreeMap::new();
    for line in DOCUMENT.lines() {
        let mut cells = line.trim_matches('|').split(" | ").map(str::trim);
        let cell = cells.next().and_then(|cell| cell.strip_prefix('`'));
        let Some(name) = cell.and_then(|cell| cell.strip_suffix('`')) else {
            continue;
        };
        let (Some(kind), Some(labels)) = (cells.next(), cells.next()) else {
            continue;
        };
        let end = match kind {
            "counter" => "_total",
            "histogram" => "_bucket",
            _ => "",
        };
        names.insert(format!("vhost_device_rdma_{name}{end}"), labels);
    }
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels
        .iter()
        .filter_map(|panel| panel["targets"].as_array());
    let mut expressions = 0;
    for target in targets.flatten() {
        let text = target["expr"].as_str().unwrap();
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let asked = text.split(|c| !word(c));
        let asked: Vec<_> = asked.filter(|word| word.starts_with("vhost_")).collect();
        assert!(!asked.is_empty(), "{text}");
        for name in asked {
            let labels = names.get(name);
            let labels = *labels.unwrap_or_else(|| panic!("{name} of {text} is not documented"));
            if text.contains("$device") {
                assert!(labels.contains("`device`"), "{text}");
            }
        }
        expressions += 1;
    }
    assert!(expressions > 20);
}

#[test]
fn what_is_no_request_for_metrics_is_refused() {
    let process = process_with(1, &["--metrics", "127.0.0.1:0"]);
    let answer = |request: &[u8]| ask(connect(&process), request);
    let mut long = b"GET /metrics HTTP/1.1\r\nX: ".to_vec();
    long.resize(8200, b'x');
    for (request, status) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "404"),
        (b"GET /metrics/ HTTP/1.1\r\n\r\n", "404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
        (b"GET /metrics\r\n\r\n", "400"),
        (b"\r\n\r\n\r\n\r\n", "400"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", "400"),
        (b"GET /metrics HTTP/1.1\r\nHost", "400"),
        (&long, "400"),
    ] {
        let (head, _) = answer(request);
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}");
    }
    let (head, body) = answer(b"HEAD /metrics?x=y HTTP/1.0\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 ") && body.is_empty());
    // Somebody who says nothing keeps others waiting for a moment.
    let silent = connect(&process);
    let gone = connect(&process);
    drop(gone);
    Told::by(connect(&process));
    drop(silent);
}

#[test]
fn a_socket_is_for_those_who_may_connect_and_goes_with_the_process() {
    let directory = vmm_sys_util::tempdir::TempDir::new().unwrap();
    let socket = directory.as_path().join("metrics");
    let path = socket.to_str().unwrap();
    let arguments = ["--metrics", path, "--socket-mode", "0600", "--user", "0"];
    let process = process_with(1, &arguments);
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(process.terminate().unwrap());
    assert!(!socket.exists());
}

/// Metrics are for this machine: those who want them from elsewhere have something in front.
#[test]
fn other_addresses_are_refused() {
    for address in [
        "0.0.0.0:9471",
        "192.0.2.1:9471",
        "[::]:9471",
        "9471",
        "metrics",
    ] {
        let output = Command::new(BINARY)
            .args(["--socket-path", "/tmp/none", "--metrics", address])
            .output()
            .unwrap();
        assert!(!output.status.success());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            said.contains("neither the path of a socket nor a loopback"),
            "{said}"
        );
    }
}
