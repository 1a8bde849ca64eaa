// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What happens when a worker fails.
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::mpsc::channel;
use std::sync::Arc;
use std::time::Duration;

use super::handle::Worker;

/// How the process ends then: EX_SOFTWARE of sysexits.h, an error inside of the program.
pub const FAILURE_STATUS: i32 = 70;

/// How long the log may take to say why.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Why a worker serves its queue pairs no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// There was a panic in it.
    #[error("panicked")]
    Panic,
    /// Its thread has ended before it was told to.
    #[error("has ended by itself")]
    End,
    /// It has used so much time of a CPU since it last began something new.
    #[error("makes no progress: it has used {0:?} of CPU time since it did something new")]
    Spin(Duration),
    /// A system call or a page fault of it has not returned for so long.
    #[error("makes no progress: it has been blocked in the kernel for {0:?}")]
    Block(Duration),
}

/// What is done about a worker that has failed: it gets its number.
pub type OnFailure = Arc<dyn Fn(u16, Failure) + Send + Sync>;

/// Says which worker has failed, and ends the process with [`FAILURE_STATUS`].
pub fn end_process(worker: u16, failure: Failure) {
    let say = move || log::error!("worker {worker} {failure}: the process ends");
    if matches!(failure, Failure::Panic | Failure::End) {
        say();
    } else {
        // The worker may have stuck while it wrote to the log, and keep others from that.
        let (said, heard) = channel();
        let thread = std::thread::Builder::new().spawn(move || {
            say();
            // Nobody listens any longer if it took too long.
            let _ = said.send(());
        });
        if thread.is_ok() {
            let _ = heard.recv_timeout(LAST_WORDS);
        }
    }
    std::process::exit(FAILURE_STATUS);
}

/// Does the `work` of a worker, and tells `failed` if it ends otherwise than by [`Worker::stop`].
pub(super) fn supervise(worker: &Worker, failed: &OnFailure, work: impl FnOnce()) {
    // What the panic leaves behind is used by nobody who waits for the end of the process.
    let failure = match catch_unwind(AssertUnwindSafe(work)) {
        Err(_) => Failure::Panic,
        Ok(()) if worker.is_stopping() => return,
        Ok(()) => Failure::End,
    };
    failed(worker.index, failure);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::{Read, Write};
    use std::path::Path;
    use std::process::{Child, Command, Stdio};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use vhost_device_rdma_bare::{Vm, VmOptions};
    use vmm_sys_util::tempdir::TempDir;

    use crate::adapter::{Adapter, AdapterSettings};
    use crate::error::log_panics;
    use crate::rnic::RnicSettings;
    use crate::sandbox::{self, Kind, Sandbox};
    use crate::socket::{Access, BoundSocket};
    use crate::vhost_user;
    use crate::worker::{Loop, ThreadOptions, Watchdog, WatchdogLimits};

    /// Long enough for a busy machine.
    const TIMEOUT: Duration = Duration::from_secs(60);
    /// Names the directory of a child process of these tests, and how its worker fails.
    const DIRECTORY: &str = "SUPERVISION_TEST_DIRECTORY";
    const FAILURE: &str = "SUPERVISION_TEST_FAILURE";

    /// What a worker fails with that does this.
    fn failure_of(body: impl FnOnce(&mut Loop) + Send + 'static) -> Failure {
        let settings = AdapterSettings::default();
        let (_adapter, mut loops) = Adapter::without_threads(&settings).unwrap();
        let work = loops.pop().unwrap();
        let (told, heard) = channel();
        let failed = Arc::new(move |worker, failure| told.send((worker, failure)).unwrap());
        let worker = work.worker();
        let options = ThreadOptions::default();
        worker.run(work, options, failed, body).unwrap();
        let (index, failure) = heard.recv_timeout(TIMEOUT).unwrap();
        assert_eq!(index, worker.index);
        worker.stop();
        failure
    }

    #[test]
    fn a_worker_that_panics_or_ends_is_told_of() {
        assert_eq!(failure_of(|_| panic!("as a test wants")), Failure::Panic);
        let end = |work: &mut Loop| {
            work.round();
        };
        assert_eq!(failure_of(end), Failure::End);
    }

    #[test]
    fn a_worker_that_is_stopped_has_not_failed() {
        let (_adapter, mut loops) = Adapter::without_threads(&AdapterSettings::default()).unwrap();
        let work = loops.pop().unwrap();
        let worker = work.worker();
        let failed = Arc::new(|worker, failure| panic!("worker {worker} {failure}"));
        let options = ThreadOptions::default();
        worker.run(work, options, failed, Loop::run).unwrap();
        worker.stop();
    }

    /// A process with a VM's socket in a directory, confined as usual. Its worker fails as soon as
    /// something comes in. Does nothing but in a child process of [`end_of`].
    #[test]
    fn child() {
        let (Ok(directory), Ok(failure)) = (std::env::var(DIRECTORY), std::env::var(FAILURE))
        else {
            return;
        };
        env_logger::init();
        log_panics();
        let socket = Path::new(&directory).join("vm");
        let socket = BoundSocket::bind(&socket, &Access::default()).unwrap();
        let settings = sandbox::Settings {
            descriptors: 1024,
            ..sandbox::Settings::default()
        };
        let sandbox = Sandbox::enter(&settings).unwrap();
        let (adapter, mut loops) = Adapter::without_threads(&AdapterSettings::default()).unwrap();
        let work = loops.pop().unwrap();
        let worker = work.worker();
        let now = Arc::new(AtomicBool::new(false));
        let fail = now.clone();
        let body = move |work: &mut Loop| {
            while !now.load(Ordering::Relaxed) {
                work.round();
                std::thread::yield_now();
            }
            match failure.as_str() {
                "panic" => panic!("as a test wants"),
                "spin" => loop {
                    std::hint::spin_loop();
                },
                _ => loop {
                    std::thread::park();
                },
            }
        };
        let failed: OnFailure = Arc::new(end_process);
        let options = ThreadOptions {
            sandbox: sandbox.clone(),
            ..ThreadOptions::default()
        };
        worker.run(work, options, failed.clone(), body).unwrap();
        let limits = WatchdogLimits {
            interval: Duration::from_millis(100),
            spinning: Duration::from_millis(300),
            blocked: 5,
        };
        let readers = adapter.readers().clone();
        let _watchdog = Watchdog::start(&[worker], readers, limits, &sandbox, failed).unwrap();
        let settings = RnicSettings::default();
        let _server = vhost_user::serve(socket, adapter.clone(), settings, &sandbox).unwrap();
        sandbox.confine(Kind::Control).unwrap();
        std::io::stdin().read_exact(&mut [0]).unwrap();
        fail.store(true, Ordering::Relaxed);
        std::thread::sleep(TIMEOUT);
        panic!("the process goes on without its worker");
    }

    /// Kills a process that a test that fails leaves behind.
    struct Process(Child);

    impl Drop for Process {
        fn drop(&mut self) {
            // It has ended, if all is well.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// How a process ends whose worker fails like this, and its log. A VM that is attached sees it.
    fn end_of(failure: &str) -> (Option<i32>, String) {
        let directory = TempDir::new().unwrap();
        let directory = directory.as_path();
        let log = directory.join("log");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([
                "--exact",
                "--nocapture",
                "worker::supervision::tests::child",
            ])
            .env(DIRECTORY, directory)
            .env(FAILURE, failure)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log).unwrap());
        let mut process = Process(command.spawn().unwrap());
        let deadline = Instant::now() + TIMEOUT;
        while !directory.join("vm").exists() {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(5));
        }
        let vm = Vm::connect(&directory.join("vm"), VmOptions::default()).unwrap();
        vm.query_port().unwrap();
        process.0.stdin.take().unwrap().write_all(b"!").unwrap();
        let status = process.0.wait().unwrap();
        assert!(vm.stop().is_err(), "the connection is still there");
        vm.kill();
        (status.code(), fs::read_to_string(log).unwrap())
    }

    #[test]
    fn a_worker_that_fails_ends_the_process_with_a_message() {
        for (failure, message) in [
            ("panic", "worker 0 panicked: the process ends"),
            ("spin", "worker 0 makes no progress: it has used "),
            (
                "block",
                "worker 0 makes no progress: it has been blocked in the kernel for ",
            ),
        ] {
            let (code, log) = end_of(failure);
            assert_eq!(code, Some(FAILURE_STATUS), "{log}");
            assert!(log.contains(message), "{log}");
        }
    }
}
