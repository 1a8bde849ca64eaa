// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask vm`: VMs for people.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::artifacts;
use crate::images::{Image, Kernel};
use crate::vm::{Bed, FrontEnd, Hosts, Plan};
use crate::{setup, shell};

/// How often to look at what a script has written.
const LOOK: Duration = Duration::from_millis(100);

/// What is wanted.
pub struct Options {
    /// How many VMs.
    pub number: u8,
    /// Their kernel.
    pub kernel: Kernel,
    /// What is installed in them.
    pub image: Image,
    /// They have neither the device nor the driver.
    pub plain: bool,
    /// Each is on a host of its own.
    pub wire: bool,
    /// What is spoken between QEMU and the device.
    pub front_end: FrontEnd,
    /// Memory of each, MiB.
    pub memory: u32,
    /// A script that runs in all of them, and how long it may take.
    pub script: Option<(PathBuf, Duration)>,
}

/// Boots VMs and attaches the terminal to them until the shells are left, or until the command is
/// interrupted. With a script, runs that in them instead, and returns whether it succeeded in all.
pub fn run(options: &Options) -> Result<bool> {
    let &Options {
        number,
        kernel,
        image,
        plain,
        wire,
        front_end,
        memory,
        ref script,
    } = options;
    let script = script.as_ref().map(|(path, timeout)| {
        let text = std::fs::read_to_string(path);
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        Ok::<_, anyhow::Error>((text, *timeout))
    });
    let script = script.transpose()?;
    setup::run()?;
    if script.is_none() {
        setup::packages(&["socat", "tmux"])?;
    }
    let (mut images, qemu, stock_qemu, stack) = if plain {
        (
            artifacts::images(&[kernel])?,
            PathBuf::from("qemu-system-x86_64"),
            None,
            None,
        )
    } else {
        let mut everything = artifacts::everything(&[kernel])?;
        if front_end.wants_stock() {
            everything.add_stock_qemu()?;
        }
        let stack = everything.stack(kernel)?;
        let stock_qemu = everything.stock_qemu().map(Path::to_owned);
        (everything.images, everything.qemu, stock_qemu, Some(stack))
    };
    if image != Image::Plain {
        images.add(image, &[kernel])?;
    }
    let plan = Plan {
        stack: stack.as_ref(),
        qemu: &qemu,
        stock_qemu: stock_qemu.as_deref(),
        root: images.root(image, kernel)?,
        kernel: images.kernel(kernel)?,
        vms: number,
        memory,
        bare: 0,
        front_end,
        hosts: if wire {
            Hosts::Tap(1500, "")
        } else {
            Hosts::One
        },
        nested: false,
        disk: None,
        logs: shell::target().join("logs/vm"),
        interactive: script.is_none(),
    };
    let mut bed = shell::step(&format!("Booting {number} VMs"), || Bed::start(&plan))?;
    if let Some((text, timeout)) = script {
        return run_script(&bed, &text, timeout);
    }
    for device in bed.devices() {
        println!("\nThe device:\n  {}", line(device.command()));
    }
    for vm in &bed.vms {
        println!(
            "\nvm{} (10.10.0.{}):\n  {}",
            vm.number,
            vm.number,
            line(vm.command())
        );
    }
    let consoles: Vec<String> = bed
        .vms
        .iter()
        .map(|vm| {
            format!(
                "socat -,rawer,escape=0x1d UNIX:{}/console-{}",
                bed.directory().display(),
                vm.number
            )
        })
        .collect();
    println!("\nSerial consoles (Ctrl-] leaves one):");
    for console in &consoles {
        println!("  {console}");
    }
    if !std::io::stdin().is_terminal() {
        println!("\nThe VMs run until this command is interrupted or the first of them ends.");
        loop {
            std::thread::sleep(std::time::Duration::from_secs(1));
            for vm in &mut bed.vms {
                if vm.check().is_err() {
                    return Ok(true);
                }
            }
        }
    }
    attach(&consoles)?;
    Ok(true)
}

/// Runs a script in all VMs at a time, and shows what it writes as it comes. Returns whether it
/// succeeded in all.
fn run_script(bed: &Bed, script: &str, timeout: Duration) -> Result<bool> {
    let deadline = Instant::now() + timeout;
    let count = bed.vms.len();
    let mut jobs = Vec::new();
    for vm in &bed.vms {
        let text = shell::quote(script);
        let command = format!(
            "printf %s {text} >/tmp/script && chmod +x /tmp/script && VM={} VMS={count} /tmp/script",
            vm.number
        );
        jobs.push((vm.number, vm.spawn(&command)?, 0));
    }
    let mut running = true;
    while running {
        running = Instant::now() < deadline && jobs.iter().any(|(_, job, _)| job.running());
        for (number, job, shown) in &mut jobs {
            let text = job.text();
            let new = text.get(*shown..).unwrap_or_default();
            // Whole lines, but at the end.
            let whole = match running {
                true => new.rfind('\n').map_or(0, |end| end + 1),
                false => new.len(),
            };
            for line in new.get(..whole).unwrap_or_default().lines() {
                println!("vm{number}: {line}");
            }
            *shown += whole;
        }
        std::thread::sleep(LOOK);
    }
    let mut succeeded = true;
    for (number, job, _) in jobs {
        if job.running() {
            println!("vm{number}: did not end in {timeout:?}");
            succeeded = false;
            continue;
        }
        let output = job.wait(Duration::ZERO)?;
        println!("vm{number}: ended with {}", output.status);
        succeeded &= output.status == 0;
    }
    Ok(succeeded)
}

/// Gives the terminal to one console, or to tmux with a pane for each.
fn attach(consoles: &[String]) -> Result<()> {
    if let [console] = consoles {
        println!("\nCtrl-] ends the VM. Press Enter for a prompt.");
        Command::new("sh").arg("-c").arg(console).status()?;
        return Ok(());
    }
    println!("\nLeaving tmux (Ctrl-b d, or Ctrl-] in every pane) ends the VMs.");
    // A server of our own: the user's sessions and settings have nothing to do with it.
    let socket = format!("virtio-rdma-{}", std::process::id());
    let tmux = || {
        let mut command = Command::new("tmux");
        command.args(["-L", &socket]);
        command
    };
    for (n, console) in consoles.iter().enumerate() {
        if n == 0 {
            tmux().args(["new-session", "-d", console]).status()?;
        } else {
            tmux()
                .args(["split-window", console, ";", "select-layout", "tiled"])
                .status()?;
        }
    }
    tmux().arg("attach").status()?;
    // It may have ended by itself.
    let _ = tmux().arg("kill-server").output();
    Ok(())
}

fn line(words: &[String]) -> String {
    words
        .iter()
        .map(|word| shell::quote(word))
        .collect::<Vec<_>>()
        .join(" ")
}
