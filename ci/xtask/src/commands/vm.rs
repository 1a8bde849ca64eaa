// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask vm`: VMs for people.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::artifacts;
use crate::images::{Image, Kernel};
use crate::vm::{Bed, Hosts, Plan};
use crate::{setup, shell};

/// Boots VMs and attaches the terminal to them until the shells are left, or until the command is
/// interrupted.
pub fn run(
    number: u8,
    kernel: Kernel,
    image: Image,
    plain: bool,
    wire: bool,
    memory: u32,
) -> Result<bool> {
    setup::run()?;
    setup::packages(&["socat", "tmux"])?;
    let (mut images, qemu, stack) = if plain {
        (
            artifacts::images(&[kernel])?,
            PathBuf::from("qemu-system-x86_64"),
            None,
        )
    } else {
        let everything = artifacts::everything(&[kernel])?;
        let stack = everything.stack(kernel)?;
        (everything.images, everything.qemu, Some(stack))
    };
    if image != Image::Plain {
        images.add(image, &[kernel])?;
    }
    let plan = Plan {
        stack: stack.as_ref(),
        qemu: &qemu,
        root: images.root(image, kernel)?,
        kernel: images.kernel(kernel)?,
        vms: number,
        memory,
        bare: 0,
        hosts: if wire {
            Hosts::Tap(1500, "")
        } else {
            Hosts::One
        },
        disk: None,
        logs: shell::target().join("logs/vm"),
        interactive: true,
    };
    let mut bed = shell::step(&format!("Booting {number} VMs"), || Bed::start(&plan))?;
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
