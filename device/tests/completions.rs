// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What shells complete of the command line. The files in `packaging/completions/` are made from
//! the command line here, and are those that the package has.
use std::path::Path;
use std::{env, fs};

use clap::CommandFactory;
use clap_complete::{generate, Shell};
use vhost_device_rdma::config::Args;

/// With this variable the files are written, not compared.
const WRITE: &str = "WRITE_COMPLETIONS";

#[test]
fn completions_are_those_of_the_command_line() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/completions");
    let files = [
        (Shell::Bash, "bash/vhost-device-rdma"),
        (Shell::Fish, "vhost-device-rdma.fish"),
        (Shell::Zsh, "_vhost-device-rdma"),
    ];
    for (shell, name) in files {
        let mut wanted = Vec::new();
        generate(
            shell,
            &mut Args::command(),
            "vhost-device-rdma",
            &mut wanted,
        );
        let path = directory.join(name);
        if env::var_os(WRITE).is_some() {
            fs::write(&path, &wanted).unwrap();
        }
        let found = fs::read(&path).unwrap_or_default();
        assert!(
            found == wanted,
            "{name} is not of this command line: \
             {WRITE}=1 cargo test -p vhost-device-rdma --test completions"
        );
    }
}
