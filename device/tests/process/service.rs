// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Under a service manager: what it is told, and sockets that it has bound.
use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use vmm_sys_util::tempdir::TempDir;

use crate::common::{assert_works, vm, Pair, TIMEOUT};

const BINARY: &str = env!("CARGO_BIN_EXE_vhost-device-rdma");

/// The process, which ends with the test.
struct Service(Child);

impl Service {
    /// Starts it; its log is at `log`.
    fn start(command: &mut Command, log: &Path) -> Self {
        let log = fs::File::create(log).unwrap();
        Self(command.stdin(Stdio::null()).stderr(log).spawn().unwrap())
    }

    /// Ends it by SIGTERM.
    fn end(&mut self) {
        let id = self.0.id().to_string();
        assert!(Command::new("kill").arg(id).status().unwrap().success());
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the service manager hears next.
fn hear(manager: &UnixDatagram) -> String {
    let mut heard = [0; 1000];
    let length = manager.recv(&mut heard).unwrap();
    String::from_utf8(heard[..length].to_vec()).unwrap()
}

/// It is told that the process is ready, lives and ends, at this name of `manager`.
fn assert_told(manager: &UnixDatagram, name: &str) {
    let directory = TempDir::new().unwrap();
    let directory = directory.as_path();
    manager.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut command = Command::new(BINARY);
    for vm in ["a", "b"] {
        command.arg("--socket-path").arg(directory.join(vm));
    }
    command.env("NOTIFY_SOCKET", name);
    command.env("WATCHDOG_USEC", "20000");
    let mut service = Service::start(&mut command, &directory.join("log"));
    assert_eq!(hear(manager), "STATUS=Serving 2 devices");
    assert_eq!(hear(manager), "READY=1");
    // It serves.
    let vm = vm(&directory.join("b"));
    assert_works(&Pair::new(&vm, &vm));
    for _ in 0..3 {
        assert_eq!(hear(manager), "WATCHDOG=1");
    }
    service.end();
    let mut last = hear(manager);
    while last == "WATCHDOG=1" {
        last = hear(manager);
    }
    let lines: Vec<_> = last.lines().collect();
    let status = "STATUS=Completing what VMs have posted, for 2s at most";
    assert_eq!(lines, ["STOPPING=1", status]);
}

#[test]
fn a_service_manager_is_told_at_a_file() {
    let directory = TempDir::new().unwrap();
    let path = directory.as_path().join("notify");
    assert_told(&UnixDatagram::bind(&path).unwrap(), path.to_str().unwrap());
}

#[test]
fn a_service_manager_is_told_at_an_abstract_name() {
    let name = format!("vhost-device-rdma-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let manager = UnixDatagram::bind_addr(&address).unwrap();
    assert_told(&manager, &format!("@{name}"));
}

#[test]
fn a_service_manager_that_does_not_listen_holds_nothing_up() {
    let directory = TempDir::new().unwrap();
    let path = directory.as_path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    let socket = directory.as_path().join("vm");
    let log = directory.as_path().join("log");
    let mut command = Command::new(BINARY);
    command.arg("--socket-path").arg(&socket);
    command.env("NOTIFY_SOCKET", &path);
    command.env("WATCHDOG_USEC", "2000");
    let mut service = Service::start(&mut command, &log);
    assert_eq!(hear(&manager), "STATUS=Serving 1 device");
    assert_eq!(hear(&manager), "READY=1");
    // More than the socket holds.
    let full = || fs::read_to_string(&log).unwrap();
    let deadline = std::time::Instant::now() + TIMEOUT;
    while !full().contains("cannot tell the service manager") {
        assert!(std::time::Instant::now() < deadline, "{}", full());
        std::thread::sleep(Duration::from_millis(2));
    }
    let vm = vm(&socket);
    assert_works(&Pair::new(&vm, &vm));
    service.end();
    // It is said once.
    let times = full().matches("cannot tell the service manager").count();
    assert_eq!(times, 1, "{}", full());
}

/// A command that runs the device with a socket as the first one that was passed.
fn with_passed(socket: OwnedFd) -> Command {
    let mut command = Command::new("sh");
    let pass = "exec 3<&1 1>/dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" \"$@\"";
    command.args(["-c", pass, BINARY]).stdout(socket);
    command
}

#[test]
fn sockets_of_the_service_manager_are_served_and_stay() {
    let directory = TempDir::new().unwrap();
    let directory = directory.as_path();
    let (passed, own) = (directory.join("passed"), directory.join("own"));
    // Whatever user it becomes may remove its sockets.
    fs::set_permissions(directory, Permissions::from_mode(0o777)).unwrap();
    let listener = UnixListener::bind(&passed).unwrap();
    let mut command = with_passed(listener.try_clone().unwrap().into());
    for (path, last) in [(&own, 1), (&passed, 2)] {
        let device = format!("{},mac=52:54:00:00:00:0{last}", path.display());
        command.args(["--socket-path", &device]);
    }
    // Who connects before the process is there waits for it.
    let mut service = Service::start(&mut command, &directory.join("log"));
    let first = vm(&passed);
    assert_works(&Pair::new(&first, &first));
    let second = vm(&own);
    assert_works(&Pair::new(&first, &second));
    drop((first, second));
    service.end();
    assert!(!own.exists());
    assert!(passed.exists());
    // The next process has it again.
    let mut command = with_passed(listener.into());
    command.arg("--socket-path").arg(&passed);
    let mut service = Service::start(&mut command, &directory.join("log"));
    let first = vm(&passed);
    assert_works(&Pair::new(&first, &first));
    service.end();
}

/// What `vhost-device-rdma` does with these arguments, without a word.
#[track_caller]
fn run(arguments: &[&OsStr]) -> String {
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(BINARY).args(arguments).output().unwrap();
    let error = String::from_utf8(stderr).unwrap();
    assert!(status.success(), "{error}");
    String::from_utf8(stdout).unwrap()
}

#[test]
fn a_socket_of_the_service_manager_is_that_of_a_device_that_comes_back() {
    let directory = TempDir::new().unwrap();
    let directory = directory.as_path();
    fs::set_permissions(directory, Permissions::from_mode(0o777)).unwrap();
    let [passed, config, status] = ["passed", "config", "status"].map(|name| directory.join(name));
    let listener = UnixListener::bind(&passed).unwrap();
    let file = format!("[[device]]\nsocket = '{}'\n", passed.display());
    fs::write(&config, &file).unwrap();
    let mut command = with_passed(listener.into());
    let arguments = [OsStr::new("--config"), config.as_ref()];
    command.args(arguments);
    command.arg("--status-socket").arg(&status);
    let mut service = Service::start(&mut command, &directory.join("log"));
    // It serves.
    drop(vm(&passed));
    let reload = [&[OsStr::new("reload"), status.as_ref()], &arguments[..]].concat();
    let of_passed = |what: &str| format!("{what} {}\n", passed.display());
    for _ in 0..2 {
        fs::write(&config, "").unwrap();
        assert_eq!(run(&reload), of_passed("removed"));
        assert!(passed.exists());
        fs::write(&config, &file).unwrap();
        assert_eq!(run(&reload), of_passed("added"));
        let vm = vm(&passed);
        assert_works(&Pair::new(&vm, &vm));
    }
    let [remove, add] =
        ["remove", "add"].map(|what| [what.as_ref(), status.as_ref(), passed.as_ref()]);
    run(&remove);
    assert!(passed.exists());
    run(&add);
    let first = vm(&passed);
    assert_works(&Pair::new(&first, &first));
    drop(first);
    service.end();
    assert!(passed.exists());
}

#[test]
fn a_service_manager_is_told_how_many_devices_there_are_now() {
    let directory = TempDir::new().unwrap();
    let directory = directory.as_path();
    let [notify, status, socket] = ["notify", "status", "vm"].map(|name| directory.join(name));
    let manager = UnixDatagram::bind(&notify).unwrap();
    manager.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut command = Command::new(BINARY);
    command.arg("--status-socket").arg(&status);
    command.env("NOTIFY_SOCKET", &notify);
    let mut service = Service::start(&mut command, &directory.join("log"));
    assert_eq!(hear(&manager), "STATUS=Serving 0 devices");
    assert_eq!(hear(&manager), "READY=1");
    run(&["add".as_ref(), status.as_ref(), socket.as_ref()]);
    assert_eq!(hear(&manager), "STATUS=Serving 1 device");
    run(&["remove".as_ref(), status.as_ref(), socket.as_ref()]);
    assert_eq!(hear(&manager), "STATUS=Serving 0 devices");
    service.end();
}

/// The process ends at once, with status 1, and says why in one line.
fn assert_refused(command: &mut Command, why: &str) {
    let Output { status, stderr, .. } = command.stderr(Stdio::piped()).output().unwrap();
    let error = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{error}");
    assert!(error.contains(why), "{error}");
}

#[test]
fn what_a_service_manager_has_wrong_is_refused() {
    let directory = TempDir::new().unwrap();
    let directory = directory.as_path();
    let (passed, own) = (directory.join("passed"), directory.join("own"));
    let serve = |mut command: Command, why: &str| {
        assert_refused(command.arg("--socket-path").arg(&own), why);
        assert!(!own.exists());
    };
    // A socket that nothing is to be served at.
    let listener = UnixListener::bind(&passed).unwrap();
    serve(
        with_passed(listener.into()),
        "was passed, but nothing is to be served there",
    );
    // What is no socket.
    let file = fs::File::open("/dev/null").unwrap();
    let why = "file descriptor 3 that was passed is no Unix socket with a path";
    serve(with_passed(file.into()), why);
    // Nobody there.
    let mut command = Command::new(BINARY);
    command.env("NOTIFY_SOCKET", directory.join("nobody"));
    serve(command, "cannot reach the service manager at NOTIFY_SOCKET");
}

#[test]
fn what_is_for_another_process_is_left_alone() {
    let directory = TempDir::new().unwrap();
    let directory = directory.as_path();
    let own = directory.join("own");
    let mut command = Command::new(BINARY);
    command.arg("--socket-path").arg(&own);
    let envs = [("LISTEN_PID", "1"), ("LISTEN_FDS", "1")];
    command.envs(envs);
    let mut service = Service::start(&mut command, &directory.join("log"));
    let log = || {
        let mut text = String::new();
        let file = fs::File::open(directory.join("log"));
        file.unwrap().read_to_string(&mut text).unwrap();
        text
    };
    let deadline = std::time::Instant::now() + TIMEOUT;
    while !log().contains("listening") {
        assert!(std::time::Instant::now() < deadline, "{}", log());
        std::thread::sleep(Duration::from_millis(2));
    }
    let vm = vm(&own);
    assert_works(&Pair::new(&vm, &vm));
    service.end();
}
