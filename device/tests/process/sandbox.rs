// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the process has given up when it serves, as the kernel tells.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::common::{assert_works, is_root, own_user, process, vm, Pair, Two, TIMEOUT};

const BINARY: &str = env!("CARGO_BIN_EXE_vhost-device-rdma");
/// A user that these tests become, who is nobody in particular.
const SOMEBODY: u32 = 54_321;

/// What /proc tells of each thread: its name, and the lines of its status.
fn threads(process: u32) -> Vec<(String, BTreeMap<String, String>)> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let status = |task: PathBuf| {
        // A thread may end meanwhile.
        let text = fs::read_to_string(task.join("status")).ok()?;
        let lines = text.lines().filter_map(|line| line.split_once(':'));
        let lines = lines.map(|(key, value)| (key.to_owned(), value.trim().to_owned()));
        let status: BTreeMap<_, _> = lines.collect();
        Some((status["Name"].clone(), status))
    };
    let tasks = tasks.map(|task| task.unwrap().path());
    tasks.filter_map(status).collect()
}

/// The user, by all of its ids, of each thread of a process. They are all confined.
#[track_caller]
fn confined(process: u32) -> u32 {
    let mut users = BTreeSet::new();
    for (name, status) in threads(process) {
        let is = |key: &str, value: &str| assert_eq!(status[key], value, "{key} of {name}");
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            is(set, "0000000000000000");
        }
        is("NoNewPrivs", "1");
        is("Seccomp", "2");
        users.extend(status["Uid"].split_whitespace().map(str::to_owned));
    }
    assert_eq!(users.len(), 1, "{users:?}");
    users.first().unwrap().parse().unwrap()
}

#[test]
fn all_threads_are_confined_and_traffic_flows() {
    let two = Two::new();
    let pair = two.pair();
    assert_works(&pair);
    let user = confined(two.process.id());
    assert_ne!(user, 0);
    let found = threads(two.process.id());
    let names: BTreeSet<_> = found.iter().map(|(name, _)| name.as_str()).collect();
    for name in [
        "vhost-device-rd",
        "worker0",
        "watchdog",
        "status",
        "vhost-user",
        "requests",
        "vring_worker",
    ] {
        assert!(names.contains(name), "{name} is not in {names:?}");
    }
    if own_user() == 0 {
        for (name, status) in &found {
            assert_eq!(status["Groups"], "", "groups of {name}");
            assert_eq!(status["CapBnd"], "0000000000000000", "{name}");
        }
    }
    assert_works(&pair);
    // The status tells what is in a file that was open before.
    let status = two.process.status().unwrap();
    assert!(status["resident_bytes"].as_u64().unwrap() > 0);
}

/// The limit of /proc/PID/limits, of which soft and hard are the same.
fn limit(process: u32, name: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{process}/limits")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let mut words = line.unwrap().split_whitespace();
    let [soft, hard] = [words.next(), words.next()].map(Option::unwrap);
    assert_eq!(soft, hard, "{name}");
    soft.parse().unwrap()
}

#[test]
fn resources_are_limited() {
    let process = process(2);
    // Who answers is confined.
    process.status().unwrap();
    for name in [
        "Max locked memory",
        "Max msgqueue size",
        "Max nice priority",
        "Max realtime priority",
    ] {
        assert_eq!(limit(process.id(), name), 0, "{name}");
    }
    // For the devices that there are, and for some that may come.
    assert!(limit(process.id(), "Max open files") <= 256 + (2 + 64) * 1024);
}

#[test]
fn without_a_sandbox_nothing_is_given_up() {
    let two = Two::with(&["--sandbox", "off"]);
    assert_works(&two.pair());
    for (name, status) in threads(two.process.id()) {
        assert_eq!(status["Seccomp"], "0", "{name}");
        assert_eq!(status["NoNewPrivs"], "0", "{name}");
        let own = own_user().to_string();
        assert!(status["Uid"].split_whitespace().all(|id| id == own));
    }
    assert!(two.process.log().contains("there is no sandbox"));
}

#[test]
fn system_calls_may_be_logged_only() {
    let two = Two::with(&["--sandbox", "log"]);
    assert_works(&two.pair());
    assert_ne!(confined(two.process.id()), 0);
}

/// A process in a directory of its own, which is that of `user`.
struct Started {
    child: Child,
    directory: PathBuf,
}

impl Started {
    /// As `change` has the command.
    fn new(name: &str, user: Option<u32>, change: impl FnOnce(&Path, &mut Command)) -> Self {
        let id = std::process::id();
        let directory = std::env::temp_dir().join(format!("sandbox-{id}-{name}"));
        fs::create_dir_all(&directory).unwrap();
        chown(&directory, user, user).unwrap();
        let mut command = Command::new(BINARY);
        change(&directory, &mut command);
        let mut started = Self {
            child: Self::run(&directory, &mut command),
            directory,
        };
        started.wait_for_socket();
        started
    }

    fn run(directory: &Path, command: &mut Command) -> Child {
        let path = directory.join("log");
        let log = fs::File::options().create(true).append(true).open(path);
        command
            .arg("--socket-path")
            .arg(directory.join("vm"))
            .stdin(Stdio::null())
            .stderr(log.unwrap())
            .spawn()
            .unwrap()
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("vm")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.join("log")).unwrap()
    }

    fn wait_for_socket(&mut self) {
        let deadline = Instant::now() + TIMEOUT;
        let ready = || self.log().contains("listening");
        while !ready() {
            assert!(Instant::now() < deadline, "{}", self.log());
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }

    /// It serves, and all of its threads are confined, as this user.
    fn assert_serves_as(&self, user: u32) {
        let vm = vm(&self.socket());
        assert_works(&Pair::new(&vm, &vm));
        assert_eq!(confined(self.child.id()), user);
    }

    /// Ends it by SIGTERM.
    fn end(&mut self) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").arg(id).status().unwrap().success());
        assert!(self.child.wait().unwrap().success(), "{}", self.log());
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

#[test]
fn the_user_can_be_chosen_and_removes_its_sockets() {
    if !is_root() {
        return;
    }
    let name = SOMEBODY.to_string();
    let mut started = Started::new("chosen", Some(SOMEBODY), |_, command| {
        command.args(["--user", &name]);
    });
    started.assert_serves_as(SOMEBODY);
    started.end();
    assert!(!started.socket().exists());
}

#[test]
fn a_socket_that_must_stay_is_replaced_by_the_next_process() {
    if !is_root() {
        return;
    }
    let mut started = Started::new("stays", Some(0), |_, _| ());
    started.end();
    assert!(started.socket().exists());
    assert!(started.log().contains("stays until the next start"));
    fs::write(started.directory.join("log"), "").unwrap();
    started.child = Started::run(&started.directory, &mut Command::new(BINARY));
    started.wait_for_socket();
    drop(vm(&started.socket()));
}

#[test]
fn an_unprivileged_user_has_nothing_to_drop() {
    if !is_root() {
        return;
    }
    let mut started = Started::new("unprivileged", Some(SOMEBODY), |directory, command| {
        // Where it was built, this user may have no business.
        let binary = directory.join("device");
        fs::copy(BINARY, &binary).unwrap();
        *command = Command::new(binary);
        command.uid(SOMEBODY).gid(SOMEBODY);
    });
    started.assert_serves_as(SOMEBODY);
    started.end();
    assert!(!started.socket().exists());
}

#[test]
fn root_without_capabilities_stays_root_and_says_so() {
    if !is_root() {
        return;
    }
    let started = Started::new("container", Some(0), |_, command| {
        // As in a container that has none.
        *command = Command::new("setpriv");
        command.args(["--bounding-set=-all", "--inh-caps=-all", "--", BINARY]);
    });
    started.assert_serves_as(0);
    assert!(started.log().contains("stays root, without capabilities"));
}

#[test]
fn a_user_that_it_cannot_become_is_an_error() {
    let name = SOMEBODY.to_string();
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-all", "--inh-caps=-all", "--", BINARY]);
    if own_user() != 0 {
        command = Command::new(BINARY);
    }
    let socket = std::env::temp_dir().join(format!("sandbox-{}-user", std::process::id()));
    command
        .args(["--user", &name, "--socket-path"])
        .arg(&socket);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("cannot become user 54321"), "{error}");
    assert!(!socket.exists());
}
