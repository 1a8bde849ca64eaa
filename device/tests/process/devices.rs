// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Devices that are added, changed and removed while the process runs.
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{json, Value};
use vhost_device_rdma::config::{access, FrontEnd};
use vhost_device_rdma::manage;
use vhost_device_rdma::status::{list_devices, set_device, Listed};
use vhost_device_rdma_bare::spec::verbs::wc_status;
use vhost_device_rdma_bare::Vm;
use vmm_sys_util::tempdir::TempDir;

use crate::common::{assert_status, assert_success, assert_works, is_root, vm, Pair, TIMEOUT};

const BINARY: &str = env!("CARGO_BIN_EXE_vhost-device-rdma");

/// A process with a status socket, in a directory of its own.
struct Process {
    directory: TempDir,
    child: Child,
}

impl Process {
    /// With these devices of a configuration file.
    fn new(devices: &str) -> Self {
        Self::with(devices, &[])
    }

    fn with(devices: &str, arguments: &[&str]) -> Self {
        let directory = TempDir::new().unwrap();
        let file = directory.as_path().join("config");
        let mut process = Self {
            child: Command::new("true").spawn().unwrap(),
            directory,
        };
        process.child.wait().unwrap();
        process.write(devices);
        let log = fs::File::create(process.path("log")).unwrap();
        process.child = Command::new(BINARY)
            .arg("--config")
            .arg(file)
            .arg("--status-socket")
            .arg(process.status())
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let deadline = Instant::now() + TIMEOUT;
        while list_devices(&process.status()).is_err() {
            assert!(Instant::now() < deadline, "{}", process.log());
            std::thread::sleep(Duration::from_millis(2));
        }
        process
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.as_path().join(name)
    }

    fn status(&self) -> PathBuf {
        self.path("status")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap()
    }

    /// Has the file have these devices: `DIR` is where sockets are.
    fn write(&self, devices: &str) {
        let directory = self.directory.as_path().to_str().unwrap();
        let text = devices.replace("DIR", directory);
        fs::write(self.path("config"), text).unwrap();
    }

    /// The command, and what it said.
    fn command(&self, command: &str, arguments: &[&str]) -> Output {
        let mut run = Command::new(BINARY);
        run.arg(command).arg(self.status()).args(arguments);
        run.output().unwrap()
    }

    /// The same. It works.
    #[track_caller]
    fn run(&self, command: &str, arguments: &[&str]) -> String {
        let Output {
            status,
            stdout,
            stderr,
        } = self.command(command, arguments);
        let error = String::from_utf8(stderr).unwrap();
        assert!(status.success(), "{error}\n{}", self.log());
        String::from_utf8(stdout).unwrap()
    }

    /// The same. It does not.
    #[track_caller]
    fn fail(&self, command: &str, arguments: &[&str]) -> String {
        let Output { status, stderr, .. } = self.command(command, arguments);
        assert_eq!(status.code(), Some(1));
        String::from_utf8(stderr).unwrap()
    }

    fn reload(&self, devices: &str) -> String {
        self.write(devices);
        let config = self.path("config");
        let said = self.run("reload", &["--config", config.to_str().unwrap()]);
        said.replace(self.directory.as_path().to_str().unwrap(), "DIR")
    }

    /// A device in the form of `--socket-path`.
    fn device(&self, name: &str, options: &str) -> String {
        format!("{}{options}", self.path(name).display())
    }

    fn devices(&self) -> Vec<Listed> {
        list_devices(&self.status()).unwrap()
    }

    fn vm(&self, name: &str) -> Arc<Vm> {
        vm(&self.path(name))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn of(name: &str, last: u8) -> String {
    format!("[[device]]\nsocket = 'DIR/{name}'\nmac = '52:54:00:00:00:0{last}'\n")
}

#[test]
fn a_device_comes_and_goes_and_others_do_not_notice() {
    let process = Process::new(&of("a", 1));
    let a = process.vm("a");
    let lasting = Pair::new(&a, &a);
    assert_works(&lasting);
    for _ in 0..3 {
        let device = process.device("b", ",mac=52:54:00:00:00:02");
        assert_eq!(process.run("add", &[&device, "--socket-mode", "0600"]), "");
        let b = process.vm("b");
        assert_works(&Pair::new(&a, &b));
        let listed = process.devices();
        let attached: Vec<_> = listed.iter().map(|device| device.attached).collect();
        assert_eq!(attached, [true, true]);
        let path = process.path("b");
        assert_eq!(process.run("remove", &["52:54:00:00:00:02"]), "");
        assert!(!path.exists());
        assert_eq!(process.devices().len(), 1);
        drop(b);
    }
    assert_works(&lasting);
}

#[test]
fn a_process_may_begin_without_devices() {
    let process = Process::new("");
    assert_eq!(process.devices(), []);
    process.run("add", &[&process.device("a", "")]);
    let a = process.vm("a");
    assert_works(&Pair::new(&a, &a));
    let list = process.run("list", &[]);
    let lines: Vec<Vec<_>> = list
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(lines[0], ["DEVICE", "MAC", "NETWORK", "LINK", "VM"]);
    let path = process.path("a");
    let row = [path.to_str().unwrap(), "-", "default", "up", "attached"];
    assert_eq!(lines[1..], [row]);
    let json: Value = serde_json::from_str(&process.run("list", &["--json"])).unwrap();
    assert_eq!(json["devices"][0]["attached"], true);
}

#[test]
fn a_file_that_is_read_again_is_what_is_served() {
    let before = [of("a", 1), of("b", 2), of("c", 3)].concat();
    let process = Process::new(&before);
    let [a, b, c] = ["a", "b", "c"].map(|name| process.vm(name));
    let lasting = Pair::new(&a, &a);
    assert_works(&Pair::new(&b, &c));
    let weighs = before.clone() + "weight = 3\n";
    assert_eq!(process.reload(&weighs), "changed DIR/c\n");
    assert_eq!(process.reload(&before), "changed DIR/c\n");
    // Its VM did not lose it.
    assert_works(&Pair::new(&b, &c));
    assert_eq!(process.reload(&before), "");
    assert_works(&lasting);
    assert_works(&Pair::new(&b, &c));
    let after = [
        of("a", 1),
        of("c", 3),
        "network = 'default'\n".to_owned(),
        of("d", 4),
    ]
    .concat();
    let said = process.reload(&after);
    let said: Vec<_> = said.lines().collect();
    assert_eq!(said, ["removed DIR/b", "changed DIR/c", "added DIR/d"]);
    assert_works(&lasting);
    assert!(!process.path("b").exists());
    drop((b, c));
    // Who was at a socket that stays finds it again.
    let [c, d] = ["c", "d"].map(|name| process.vm(name));
    assert_works(&Pair::new(&c, &d));
    assert_works(&Pair::new(&a, &d));
    assert_eq!(process.reload(&after), "");
    assert_eq!(process.devices().len(), 3);
    drop((lasting, a, c, d));
    // Limits of all are those of each.
    let said = process.reload(&format!("[limits]\nqps = 7\n{after}"));
    assert_eq!(said.lines().count(), 3, "{said}");
}

#[test]
fn a_file_that_makes_no_sense_changes_nothing() {
    let process = Process::new(&of("a", 1));
    let config = process.path("config");
    let config = config.to_str().unwrap();
    for (devices, said) in [
        ([of("b", 2), of("b", 3)].concat(), "given twice"),
        ("workers = 0\n".to_owned(), "0 workers"),
        ("[[device]]\n".to_owned(), "not a valid configuration"),
    ] {
        process.write(&devices);
        let error = process.fail("reload", &["--config", config]);
        assert!(error.contains(said), "{error}");
    }
    let names = process.devices();
    assert_eq!(names.len(), 1);
    assert!(process.path("a").exists());
}

#[test]
fn a_client_that_reads_nothing_does_not_hold_up_the_end() {
    let mut process = Process::new(&of("a", 1));
    let mut client = UnixStream::connect(process.status()).unwrap();
    // The answer names it, each character in six, which is more than the socket holds.
    let request = format!("link {} up\n", "\u{1}".repeat(60_000));
    client.write_all(request.as_bytes()).unwrap();
    // It is being answered.
    client.read_exact(&mut [0]).unwrap();
    let begun = Instant::now();
    let id = process.child.id().to_string();
    assert!(Command::new("kill").arg(id).status().unwrap().success());
    assert!(process.child.wait().unwrap().success());
    let taken = begun.elapsed();
    assert!(taken < Duration::from_secs(4), "{taken:?}");
}

#[test]
fn limits_change_while_a_vm_sends() {
    let process = Process::new(&of("a", 1));
    let a = process.vm("a");
    let pair = Pair::new(&a, &a);
    let write = || {
        let to = &pair.b.mr;
        pair.a
            .qp
            .write(1, &[pair.a.mr.sge(0, 1000)], to.iova, to.rkey)
            .unwrap();
    };
    write();
    assert_success(&pair.a.sent());
    let mac = "52:54:00:00:00:01";
    let limits = |arguments: &[&str]| process.run("limits", &[&[mac], arguments].concat());
    // What the first one spends would take a quarter of an hour to pay for.
    assert_eq!(limits(&["--bytes-per-second", "1"]), "");
    write();
    assert_success(&pair.a.sent());
    write();
    pair.a.assert_quiet();
    assert_eq!(
        limits(&["--bytes-per-second", "1000000", "--weight", "300"]),
        ""
    );
    assert_success(&pair.a.sent());
    assert_eq!(limits(&["--bytes-per-second", "1"]), "");
    write();
    assert_success(&pair.a.sent());
    // One that is there when the first is carried out may go with it.
    write();
    pair.a.assert_quiet();
    assert_eq!(limits(&["--bytes-per-second", "0"]), "");
    assert_success(&pair.a.sent());
    assert_works(&pair);
    // What was not named stays.
    let told: Value = serde_json::from_str(&limits(&["--json"])).unwrap();
    let told = &told["devices"][0]["limits"];
    assert_eq!(told["weight"], 300);
    assert_eq!(told["bytes_per_second"], Value::Null);
    assert!(told["qps"].as_u64() > Some(0) && told["footprint"].as_u64() > Some(0));
    let table = process.run("limits", &[]);
    let has = |words: [&str; 2]| {
        table
            .lines()
            .any(|line| line.split_whitespace().skip(1).eq(words))
    };
    assert!(
        has(["weight", "300"]) && has(["bytes_per_second", "-"]),
        "{table}"
    );
    for (arguments, said) in [
        (&[mac, "--weight", "0"][..], "the weight 0 of"),
        (&["nobody", "--weight", "1"], "there is no device 'nobody'"),
        (&["nobody"], "there is no device 'nobody'"),
    ] {
        let error = process.fail("limits", arguments);
        assert!(error.contains(said), "{error}");
    }
    // The file is what holds when it is read again.
    assert_eq!(process.reload(&of("a", 1)), "changed DIR/a\n");
    assert_eq!(process.reload(&of("a", 1)), "");
    assert_works(&pair);
}

#[test]
fn counters_are_printed() {
    let process = Process::new(&[of("a", 1), of("b", 2)].concat());
    let [a, b] = ["a", "b"].map(|name| process.vm(name));
    let pair = Pair::new(&a, &b);
    let (to, from) = (&pair.b.mr, [pair.a.mr.sge(0, 1000)]);
    pair.a.qp.write(1, &from, to.iova, to.rkey).unwrap();
    assert_success(&pair.a.sent());
    pair.a
        .qp
        .write(1, &from, to.iova, to.rkey ^ 0xff00)
        .unwrap();
    assert_status(&pair.a.sent(), wc_status::REM_ACCESS_ERR);
    let told: Value = serde_json::from_str(&process.run("counters", &["--json"])).unwrap();
    let devices = told["devices"].as_array().unwrap();
    let [a, b] = ["a", "b"].map(|name| process.path(name).display().to_string());
    let of = |name: &String| &devices.iter().find(|of| of["name"] == *name).unwrap()["counters"];
    assert_eq!(of(&a)["tx_bytes"], 1000);
    assert_eq!(of(&a)["errors_by_status"]["REM_ACCESS_ERR"], 1);
    assert_eq!(of(&b)["rx_messages"], 1);
    let table = process.run("counters", &["52:54:00:00:00:01"]);
    let rows: Vec<Vec<_>> = table
        .lines()
        .map(|row| row.split_whitespace().collect())
        .collect();
    assert_eq!(rows[0], ["DEVICE", "COUNTERS", "VALUE"]);
    assert!(rows.contains(&vec![&*a, "tx_messages", "1"]), "{table}");
    assert!(
        rows.contains(&vec![&*a, "errors_by_status", "REM_ACCESS_ERR", "1"]),
        "{table}"
    );
    assert!(!table.contains(&b), "{table}");
    let error = process.fail("counters", &["nobody"]);
    assert!(error.contains("there is no device 'nobody'"), "{error}");
}

#[test]
fn a_device_that_is_added_may_be_one_of_vfio_user() {
    let process = Process::new("");
    let device = process.device("a", ",mac=52:54:00:00:00:01,weight=7,front-end=vfio-user");
    process.run("add", &[&device]);
    assert_eq!(process.devices()[0].front_end, FrontEnd::VfioUser);
    let told: Value = serde_json::from_str(&process.run("limits", &["--json"])).unwrap();
    assert_eq!(told["devices"][0]["limits"]["weight"], 7);
    // It speaks that.
    vfio_user::Client::new(&process.path("a")).unwrap();
}

#[test]
fn what_vms_do_can_be_watched() {
    let process = Process::new(&of("a", 1));
    let a = process.vm("a");
    let pair = Pair::new(&a, &a);
    assert_works(&pair);
    let text = process.run("top", &["--interval", "0.1", "--times", "2"]);
    let path = process.path("a");
    let vms = text
        .lines()
        .filter(|line| line.starts_with(path.to_str().unwrap()));
    assert_eq!(vms.count(), 2, "{text}");
    let error = process.fail("top", &["--interval", "0"]);
    assert!(error.contains("every 0 s"), "{error}");
}

#[test]
fn own_gids_of_a_device_are_its_own_while_it_is_there() {
    let process = Process::new(&of("a", 1));
    let a = process.vm("a");
    let address = [[0; 10].as_slice(), &[0xff, 0xff, 10, 0, 0, 2]].concat();
    let gid: [u8; 16] = address.try_into().unwrap();
    let device = process.device("b", ",address=10.0.0.2");
    process.run("add", &[&device]);
    assert!(a.set_gid(1, gid).is_err());
    process.run("remove", &[process.path("b").to_str().unwrap()]);
    a.set_gid(1, gid).unwrap();
}

#[test]
fn what_cannot_be_served_is_refused() {
    let process = Process::new(&of("a", 1));
    let set = |device: Value, socket: Option<&UnixListener>| {
        let asked = json!({ "device": device });
        set_device(&process.status(), &asked, socket).map_err(|error| error.to_string())
    };
    let path = process.path("b");
    let listener = UnixListener::bind(&path).unwrap();
    let b = |more: Value| {
        let mut device = json!({ "socket": path });
        let (Some(device_of), Value::Object(more)) = (device.as_object_mut(), more) else {
            unreachable!();
        };
        device_of.extend(more);
        set(device, Some(&listener))
    };
    for (more, said) in [
        (json!({ "weight": 0 }), "the weight 0"),
        (json!({ "vni": 7 }), "no [wire]"),
        (json!({ "netdev": "lo" }), "an interface of its own"),
        (
            json!({ "transport": "iwarp", "iwarp": { "address": "127.0.0.1" } }),
            "iWARP from the start",
        ),
        (json!({ "wieght": 1 }), "a device is"),
    ] {
        let error = b(more).unwrap_err();
        assert!(error.contains(said), "{error}");
    }
    let error = set(json!({ "socket": path }), None).unwrap_err();
    assert!(error.contains("no socket that listens"), "{error}");
    let error = process.fail("remove", &["nobody"]);
    assert!(error.contains("there is no device 'nobody'"), "{error}");
    assert!(process.path("a").exists());
    // What does not listen is no socket to serve.
    assert_eq!(process.devices().len(), 1);
    assert_eq!(b(json!({})).unwrap(), "added");
    assert_eq!(b(json!({})).unwrap(), "same");
    drop(listener);
    assert_works(&{
        let vm = process.vm("b");
        Pair::new(&vm, &vm)
    });
    // A socket that somebody serves is not taken away.
    let nobody = access(None, None, None).unwrap();
    let text = path.to_str().unwrap();
    let error = manage::add(&process.status(), text, &nobody).unwrap_err();
    assert!(error.to_string().contains("another process listens"));
}

#[test]
fn only_operators_say_what_devices_there_are() {
    if !is_root() {
        return;
    }
    let process = Process::with(&of("a", 1), &["--socket-mode", "0777"]);
    // Where it was built, somebody else may have no business.
    let binary = process.path("device");
    fs::copy(BINARY, &binary).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(process.directory.as_path(), open).unwrap();
    let run = |command: &str, arguments: &[&Path]| {
        let mut run = Command::new("setpriv");
        run.args(["--reuid=54321", "--clear-groups", "--"]);
        run.arg(&binary).arg(command).arg(process.status());
        run.args(arguments).output().unwrap()
    };
    assert!(run("list", &[]).status.success());
    let removed = run("remove", &[&process.path("a")]);
    let error = String::from_utf8(removed.stderr).unwrap();
    assert!(
        error.contains("only root and the user that started"),
        "{error}"
    );
    let change = run("limits", &[&process.path("a"), "--weight=2".as_ref()]);
    assert!(!change.status.success());
    assert!(run("limits", &[]).status.success());
    assert_eq!(process.devices().len(), 1);
}
