// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vhost-device-rdma`: command line in, sockets served until SIGTERM or SIGINT.
#![forbid(unsafe_code)]

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use log::info;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use vhost_device_rdma::adapter::Adapter;
use vhost_device_rdma::config::{Args, Command, Config, LinkState, ServeArgs};
use vhost_device_rdma::error::sentence;
use vhost_device_rdma::heap;
use vhost_device_rdma::socket::Access;
use vhost_device_rdma::status::{self, StatusServer};
use vhost_device_rdma::vhost_user::Server;

fn main() -> ExitCode {
    heap::set_up();
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).init();
    let args = Args::parse();
    let result = match args.command {
        Some(Command::Status { path, pretty }) => print_status(&path, pretty),
        Some(Command::Link {
            path,
            device,
            state,
        }) => status::set_link(&path, &device, state == LinkState::Up).map_err(Into::into),
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

fn serve(args: ServeArgs) -> Result<(), Box<dyn Error>> {
    let config = Config::new(args)?;
    // Before any socket exists, so that none is left behind.
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let adapter = Adapter::new(&config.adapter)?;
    let mut servers = Vec::new();
    let mut status_server = None;
    let result = start(
        &adapter,
        config.devices,
        &config.access,
        config.status_socket.as_deref(),
        &mut servers,
        &mut status_server,
    );
    if result.is_ok() {
        if let Some(signal) = signals.forever().next() {
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
            info!("ending on {name}");
        }
    }
    servers.into_iter().for_each(Server::stop);
    status_server.into_iter().for_each(StatusServer::stop);
    adapter.shutdown();
    result
}

fn start(
    adapter: &std::sync::Arc<Adapter>,
    devices: Vec<(std::path::PathBuf, vhost_device_rdma::rnic::RnicSettings)>,
    access: &Access,
    status_socket: Option<&std::path::Path>,
    servers: &mut Vec<Server>,
    status_server: &mut Option<StatusServer>,
) -> Result<(), Box<dyn Error>> {
    let all = devices
        .iter()
        .map(|(_, settings)| settings.clone())
        .collect();
    for (path, settings) in devices {
        servers.push(Server::start(&path, access, adapter.clone(), settings)?);
    }
    if let Some(path) = status_socket {
        *status_server = Some(StatusServer::start(path, access, adapter.clone(), all)?);
    }
    Ok(())
}
