// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A `vhost-device-rdma` process of our own.
use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::Error;

/// Names the binary of the device, for everyone who does not name it otherwise.
const BINARY_VARIABLE: &str = "VHOST_DEVICE_RDMA";
/// How long the process may take to listen.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// How long the process may take to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// How to start the device.
#[derive(Debug, Clone)]
pub struct ProcessOptions {
    /// The binary; otherwise the environment variable VHOST_DEVICE_RDMA names it, otherwise it is
    /// beside the running one.
    pub binary: Option<PathBuf>,
    /// For each VM the options of its socket, such as `mac=52:54:00:00:00:01,network=a`.
    pub vms: Vec<String>,
    /// How many of them, the first ones, have sockets of vfio-user.
    pub vfio_user: usize,
    /// Further arguments.
    pub arguments: Vec<String>,
}

impl ProcessOptions {
    /// For so many VMs on one network.
    #[must_use]
    pub fn vms(count: u8) -> Self {
        Self {
            binary: None,
            vms: (1..=count)
                .map(|i| format!("mac=52:54:00:00:00:{i:02x}"))
                .collect(),
            vfio_user: 0,
            arguments: Vec::new(),
        }
    }

    /// With this binary.
    #[must_use]
    pub fn binary(mut self, path: impl Into<PathBuf>) -> Self {
        self.binary = Some(path.into());
        self
    }

    /// With so many VMs, the first ones, on sockets of vfio-user.
    #[must_use]
    pub fn vfio_user(mut self, count: usize) -> Self {
        self.vfio_user = count;
        self
    }

    /// With these further arguments.
    #[must_use]
    pub fn arguments(mut self, arguments: &[&str]) -> Self {
        self.arguments
            .extend(arguments.iter().map(ToString::to_string));
        self
    }
}

/// A running device. It is killed when dropped; its log is shown if the thread panics (a test
/// fails).
#[derive(Debug)]
pub struct DeviceProcess {
    child: Child,
    directory: PathBuf,
    sockets: Vec<PathBuf>,
}

impl DeviceProcess {
    /// Starts the device, and waits until it listens.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn start(options: &ProcessOptions) -> Result<Self, Error> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("bare-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&directory)?;
        let sockets: Vec<PathBuf> = (0..options.vms.len())
            .map(|i| directory.join(format!("vm{i}")))
            .collect();
        let mut command = Command::new(binary(options)?);
        for (number, (socket, vm)) in sockets.iter().zip(&options.vms).enumerate() {
            let separator = if vm.is_empty() { "" } else { "," };
            let option = match number < options.vfio_user {
                true => "--vfio-user-path",
                false => "--socket-path",
            };
            command
                .arg(option)
                .arg(format!("{}{separator}{vm}", socket.display()));
        }
        let child = command
            .arg("--status-socket")
            .arg(directory.join("status"))
            .args(&options.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(directory.join("log"))?)
            .spawn()?;
        let mut process = Self {
            child,
            directory,
            sockets,
        };
        let deadline = Instant::now() + START_TIMEOUT;
        // The status socket is the last one to be bound. (It is there before it can be connected to.)
        while process.status().is_err() {
            if !process.is_alive() || Instant::now() > deadline {
                return Err(Error::Process(process.log()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(process)
    }

    /// The socket of a VM.
    ///
    /// # Panics
    /// If it was not started with as many.
    #[must_use]
    pub fn socket(&self, vm: usize) -> &Path {
        &self.sockets[vm]
    }

    /// Process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// What it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.join("log")).unwrap_or_default()
    }

    /// What its status socket tells.
    ///
    /// # Errors
    /// If it does not answer, or not with JSON.
    pub fn status(&self) -> Result<serde_json::Value, Error> {
        self.request(b"")
    }

    /// Takes the link of a VM's device down or up.
    ///
    /// # Errors
    /// If it does not answer as it should.
    ///
    /// # Panics
    /// If it was not started with as many VMs.
    pub fn set_link(&self, vm: usize, up: bool) -> Result<(), Error> {
        let state = if up { "up" } else { "down" };
        let request = format!("link {} {state}\n", self.socket(vm).display());
        let answer = self.request(request.as_bytes())?;
        if answer["link_up"] != up {
            return Err(Error::Process(answer.to_string()));
        }
        Ok(())
    }

    /// The socket that gives its status.
    #[must_use]
    pub fn status_socket(&self) -> PathBuf {
        self.directory.join("status")
    }

    /// What the status socket answers to a request.
    ///
    /// # Errors
    /// If it does not answer, or not with JSON.
    pub fn request(&self, request: &[u8]) -> Result<serde_json::Value, Error> {
        let mut stream = UnixStream::connect(self.status_socket())?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        stream.write_all(request)?;
        stream.shutdown(Shutdown::Write)?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        serde_json::from_str(&text).map_err(|e| Error::Process(format!("{e} in {text}")))
    }

    /// Ends it by SIGTERM, and returns whether it exited with success.
    ///
    /// # Errors
    /// If it does not end.
    pub fn terminate(mut self) -> Result<bool, Error> {
        self.tell_to_end()?;
        self.wait_for_end()
    }

    /// Sends it SIGTERM.
    ///
    /// # Errors
    /// If there is no such process.
    pub fn tell_to_end(&self) -> Result<(), Error> {
        // There is no safe call for it in std.
        let killed = Command::new("kill")
            .arg(self.child.id().to_string())
            .status()?;
        if !killed.success() {
            return Err(Error::Process("cannot send SIGTERM".into()));
        }
        Ok(())
    }

    /// Waits until it has ended, and returns whether it exited with success.
    ///
    /// # Errors
    /// If it does not end.
    pub fn wait_for_end(&mut self) -> Result<bool, Error> {
        let deadline = Instant::now() + STOP_TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status.success());
            }
            if Instant::now() > deadline {
                return Err(Error::Process("it does not end".into()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for DeviceProcess {
    fn drop(&mut self) {
        // It may have ended; then there is nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- log of the device\n{}---", self.log());
        }
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn binary(options: &ProcessOptions) -> Result<PathBuf, Error> {
    if let Some(path) = &options.binary {
        return Ok(path.clone());
    }
    if let Some(path) = std::env::var_os(BINARY_VARIABLE) {
        return Ok(path.into());
    }
    let own = std::env::current_exe()?;
    own.ancestors()
        .skip(1)
        .take(2)
        .map(|directory| directory.join("vhost-device-rdma"))
        .find(|path| path.exists())
        .ok_or_else(|| Error::Process(format!("no binary; {BINARY_VARIABLE} can name one")))
}
