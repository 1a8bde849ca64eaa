// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vhost-device-rdma`: command line in, sockets served until SIGTERM or SIGINT, and then for as long as
//! what is posted takes.
#![forbid(unsafe_code)]

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use log::{info, warn};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Uid;
use vhost_device_rdma::adapter::Adapter;
use vhost_device_rdma::check::{self, Subjects};
use vhost_device_rdma::config::{
    access, Args, Command, Config, DeviceConfig, LimitsArgs, LinkState, ServeArgs,
};
use vhost_device_rdma::devices::Devices;
use vhost_device_rdma::drain::Drain;
use vhost_device_rdma::epoll_fd::{EpollFd, NO_EVENT};
use vhost_device_rdma::error::{log_panics, sentence};
use vhost_device_rdma::heap;
use vhost_device_rdma::logging::{self, LogFormat};
use vhost_device_rdma::manage;
use vhost_device_rdma::memory::choose_copy;
use vhost_device_rdma::metrics::{Metrics, MetricsServer};
use vhost_device_rdma::play::Scenario;
use vhost_device_rdma::rnic::RnicSettings;
use vhost_device_rdma::sandbox::{Kind, Mode, Sandbox};
use vhost_device_rdma::service::Manager;
use vhost_device_rdma::socket::{self, Address, Bound, BoundSocket};
use vhost_device_rdma::status::{self, StatusServer};
use vhost_device_rdma::top::{self, TopSettings};
use vhost_device_rdma::wire_setup;

/// How often to look whether work requests have completed before the process ends.
const DRAIN_LOOK: Duration = Duration::from_millis(1);

fn main() -> ExitCode {
    heap::set_up();
    let args = Args::parse();
    if args.command.is_some() {
        logging::set_up(LogFormat::default());
    }
    let result = match args.command {
        Some(Command::Status { path, pretty }) => print_status(&path, pretty),
        Some(Command::Link {
            path,
            device,
            state,
        }) => status::set_link(&path, &device, state == LinkState::Up).map_err(Into::into),
        Some(Command::List { path, json }) => {
            manage::list(&path, json, &mut io::stdout()).map_err(Into::into)
        }
        Some(Command::Limits {
            path,
            device: Some(device),
            change,
            ..
        }) if change != LimitsArgs::default() => status::set_limits(&path, &device, &change)
            .map(drop)
            .map_err(Into::into),
        Some(Command::Limits {
            path, device, json, ..
        }) => manage::limits(&path, device.as_deref(), json, &mut io::stdout()).map_err(Into::into),
        Some(Command::Counters { path, device, json }) => {
            manage::counters(&path, device.as_deref(), json, &mut io::stdout()).map_err(Into::into)
        }
        Some(Command::Top {
            path,
            interval,
            times,
            queue_pairs,
        }) => TopSettings::new(interval, times, queue_pairs)
            .and_then(|settings| top::run(&path, &settings, &mut io::stdout()))
            .map_err(Into::into),
        Some(Command::Check {
            status_socket,
            lspci,
        }) => {
            let subjects = Subjects {
                status_socket,
                lspci,
            };
            match check::run(&subjects, &mut io::stdout()) {
                Ok(false) => return ExitCode::FAILURE,
                Ok(true) => Ok(()),
                Err(error) => Err(error.into()),
            }
        }
        Some(Command::Add {
            path,
            device,
            socket_mode,
            socket_owner,
            socket_group,
        }) => access(socket_mode, socket_owner, socket_group)
            .map_err(Into::into)
            .and_then(|access| Ok(manage::add(&path, &device, &access)?)),
        Some(Command::Remove { path, device }) => {
            manage::remove(&path, &device).map_err(Into::into)
        }
        Some(Command::Reload { path, config }) => {
            manage::reload(&path, &config, &mut io::stdout()).map_err(Into::into)
        }
        Some(Command::WireSetup {
            netdev,
            pins,
            remove: true,
            ..
        }) => wire_setup::remove(&netdev, &pins).map_err(Into::into),
        Some(Command::WireSetup {
            netdev, user, pins, ..
        }) => {
            let user = user.as_deref();
            wire_setup::set_up(&netdev, user, &pins, &mut std::io::stdout()).map_err(Into::into)
        }
        Some(Command::Faults {
            path,
            device,
            direction,
            faults,
        }) => {
            status::set_faults(&path, &device, direction, faults.0.as_deref()).map_err(Into::into)
        }
        Some(Command::Fail {
            path,
            device,
            what,
            number,
        }) => status::fail(&path, &device, what, number).map_err(Into::into),
        Some(Command::Play { path, file }) => play(&path, &file),
        Some(Command::Capture { path, vm, snap }) => capture(&path, vm.as_deref(), snap),
        None => serve(args.serve),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vhost-device-rdma: {}", sentence(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn print_status(path: &std::path::Path, pretty: bool) -> Result<(), Box<dyn Error>> {
    let text = status::query(path, pretty)?;
    writeln!(std::io::stdout(), "{text}")?;
    Ok(())
}

fn play(path: &Path, file: &Path) -> Result<(), Box<dyn Error>> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    Ok(Scenario::read(&text)?.play(path, &mut std::io::stdout())?)
}

fn capture(path: &Path, vm: Option<&str>, snap: usize) -> Result<(), Box<dyn Error>> {
    let mut out = std::io::stdout();
    if out.is_terminal() {
        return Err("a capture is no text: send it to a file, or to `wireshark -k -i -`".into());
    }
    Ok(status::capture(path, vm, snap, &mut out)?)
}

fn serve(args: ServeArgs) -> Result<(), Box<dyn Error>> {
    let mut config = Config::new(args)?;
    logging::set_up(config.log_format);
    let mut manager = Manager::from_environment()?;
    let operator = Uid::effective();
    // Before any socket exists, so that none is left behind, and before any thread does: only this
    // one takes them.
    let signals = [Signal::SIGINT, Signal::SIGTERM];
    let signals: SigSet = signals.into_iter().collect();
    signals.thread_block()?;
    let end = End::of(&signals)?;
    let sockets = Sockets::bind(&config, &mut manager)?;
    manager.check_sockets()?;
    let watch = config.uplinks.watch()?;
    let uplinks = std::mem::take(&mut config.uplinks).open()?;
    let sandbox = Sandbox::enter(&config.sandbox)?;
    if config.sandbox.mode != Mode::Off {
        // A confined thread could not read what a backtrace takes.
        log_panics();
    }
    config.adapter.sandbox = sandbox.clone();
    config.adapter.uplinks = uplinks;
    choose_copy();
    let adapter = Adapter::new(&config.adapter)?;
    let defaults = config.defaults.clone();
    let reports = manager.reports();
    let devices = Devices::new(adapter.clone(), sandbox.clone(), defaults, reports);
    let mut running = Running::new(devices);
    let result = watch.map_or(Ok(()), |watch| {
        let devices = config.devices.iter().map(|(_, device)| device);
        adapter
            .follow_interfaces(watch, devices, &sandbox)
            .map_err(Into::into)
    });
    let result = result.and_then(|()| running.start(sockets, config.devices, operator, &sandbox));
    let result = result.and_then(|()| Ok(sandbox.confine(Kind::Control)?));
    let result = result.and_then(|()| {
        manager.ready();
        if let Some(signal) = end.wait(&manager, None)? {
            info!("ending on {signal}");
        }
        manager.stopping(config.drain);
        Ok(running.drain(&adapter, config.drain, &end, &manager)?)
    });
    if result.is_err() {
        manager.stopping(Duration::ZERO);
    }
    running.stop();
    adapter.shutdown();
    result
}

/// The signals that end the process, and how they are waited for.
struct End {
    signals: SignalFd,
    epoll: EpollFd,
}

impl End {
    fn of(signals: &SigSet) -> io::Result<Self> {
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals = SignalFd::with_flags(signals, flags)?;
        let epoll = EpollFd::new()?;
        epoll.add(&signals, 0)?;
        Ok(Self { signals, epoll })
    }

    /// Waits for one, or until a time, and tells the service manager meanwhile that the process lives.
    fn wait(&self, manager: &Manager, until: Option<Instant>) -> io::Result<Option<Signal>> {
        loop {
            if let Some(signal) = self.signals.read_signal()? {
                let signal = i32::try_from(signal.ssi_signo).map_err(io::Error::other)?;
                return Ok(Some(Signal::try_from(signal)?));
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            let time = manager.alive().into_iter().chain(left).min();
            let time = time.map(|time| time.as_millis().clamp(1, i32::MAX as u128));
            let time = time.map_or(-1, |time| time as i32);
            self.epoll.wait(time, &mut [NO_EVENT])?;
        }
    }
}

/// The sockets of the process, bound.
struct Sockets {
    devices: Vec<BoundSocket>,
    metrics: Option<Bound>,
    status: Option<BoundSocket>,
}

impl Sockets {
    /// Those that the service manager has bound already, and the others.
    fn bind(config: &Config, manager: &mut Manager) -> Result<Self, socket::Error> {
        let mut bind = |path: &Path| match manager.take_socket(path) {
            Some(listener) => Ok(BoundSocket::of_manager(path, listener)),
            None => BoundSocket::bind(path, &config.access),
        };
        let devices = config.devices.iter();
        let devices = devices
            .map(|(device, _)| bind(&device.socket))
            .collect::<Result<_, _>>()?;
        let metrics = config.metrics.as_ref();
        let metrics = metrics.map(|at| match at {
            Address::Path(path) => bind(path).map(Bound::Socket),
            Address::Port(port) => Bound::at(*port),
        });
        let metrics = metrics.transpose()?;
        // The last one: a process that waits for it finds the others.
        let status = config.status_socket.as_deref().map(&mut bind);
        let status = status.transpose()?;
        Ok(Self {
            devices,
            metrics,
            status,
        })
    }
}

/// What serves the sockets.
struct Running {
    devices: Arc<Devices>,
    metrics: Option<MetricsServer>,
    status: Option<StatusServer>,
}

impl Running {
    fn new(devices: Devices) -> Self {
        Self {
            devices: Arc::new(devices),
            metrics: None,
            status: None,
        }
    }

    fn start(
        &mut self,
        sockets: Sockets,
        configured: Vec<(DeviceConfig, RnicSettings)>,
        operator: Uid,
        sandbox: &Sandbox,
    ) -> Result<(), Box<dyn Error>> {
        let devices = &self.devices;
        devices.start(configured, sockets.devices)?;
        if let Some(bound) = sockets.metrics {
            let metrics = Metrics::new(devices.clone());
            self.metrics = Some(MetricsServer::start(bound, metrics, sandbox)?);
        }
        if let Some(socket) = sockets.status {
            let server = StatusServer::start(socket, devices.clone(), operator, sandbox)?;
            self.status = Some(server);
        }
        Ok(())
    }

    /// Takes no new devices and front ends, and lets work requests that are posted complete: for `most`
    /// at most, or until a further signal.
    fn drain(
        &mut self,
        adapter: &Arc<Adapter>,
        most: Duration,
        end: &End,
        manager: &Manager,
    ) -> io::Result<()> {
        if most.is_zero() {
            return Ok(());
        }
        self.status.take().into_iter().for_each(StatusServer::stop);
        self.devices.close();
        let until = Instant::now() + most;
        let mut drain = Drain::begin(adapter);
        let posted = drain.queue_pairs();
        info!("work requests of {posted} queue pairs may complete, for {most:?} at most");
        while !drain.is_over() {
            let now = Instant::now();
            if now >= until {
                let left = drain.queue_pairs();
                warn!("ending with work requests of {left} queue pairs that have not completed");
                break;
            }
            let look = until.min(now + DRAIN_LOOK);
            if let Some(signal) = end.wait(manager, Some(look))? {
                info!("ending at once on another {signal}");
                break;
            }
        }
        Ok(())
    }

    fn stop(self) {
        // First: no device comes any longer.
        self.status.into_iter().for_each(StatusServer::stop);
        self.metrics.into_iter().for_each(MetricsServer::stop);
        self.devices.stop();
    }
}
