// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The files of docs/libvirt: what the hook asks of the device process, and that what one file names
//! is what the others name. The lane `libvirt` runs them.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A device process that says what it is asked, and refuses what has "refuse" in it.
const PROGRAM: &str = "#!/bin/sh\necho \"$@\"\ncase $* in *refuse*) echo no >&2; exit 1;; esac\n";

fn documents() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/libvirt")
}

fn read(name: &str) -> String {
    fs::read_to_string(documents().join(name)).expect("a file of docs/libvirt")
}

/// Runs the hook as libvirt does.
fn hook(operation: [&str; 2], xml: &str) -> Output {
    let name = format!(
        "libvirt-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    );
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&directory).expect("a directory");
    let program = directory.join("vhost-device-rdma");
    fs::write(&program, PROGRAM).expect("written");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("executable");
    let mut child = Command::new("python3")
        .arg(documents().join("hook"))
        .args(["vm1", operation[0], operation[1], "-"])
        .env("PATH", format!("{}:/usr/bin:/bin", directory.display()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("python3");
    let mut stdin = child.stdin.take().expect("a pipe");
    // It need not read it.
    let _ = stdin.write_all(xml.as_bytes());
    drop(stdin);
    child.wait_with_output().expect("it ends")
}

/// What the hook asked the device process, when all went well.
fn asked(operation: [&str; 2], xml: &str) -> String {
    let output = hook(operation, xml);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{error}");
    let text = String::from_utf8(output.stdout).expect("text");
    // A host that has the service has its status socket there.
    text.replace("/operator/", "/")
}

#[test]
fn the_hook_adds_the_device_of_the_document_and_removes_it() {
    let xml = read("domain.xml");
    assert_eq!(
        asked(["prepare", "begin"], &xml),
        "add /run/vrdma/status.sock /run/vrdma/vm1.sock,mac=52:54:00:12:34:01 \
         --socket-owner libvirt-qemu --socket-mode 600\n"
    );
    assert_eq!(
        asked(["release", "end"], &xml),
        "remove /run/vrdma/status.sock /run/vrdma/vm1.sock\n"
    );
    assert_eq!(asked(["started", "begin"], &xml), "");
}

#[test]
fn the_hook_adds_a_device_of_vfio_user() {
    let xml = read("domain-vfio-user.xml");
    assert_eq!(
        asked(["prepare", "begin"], &xml),
        "add /run/vrdma/status.sock \
         /run/vrdma/vm1.sock,front-end=vfio-user,mac=52:54:00:12:34:01 \
         --socket-owner libvirt-qemu --socket-mode 600\n"
    );
    assert_eq!(
        asked(["release", "end"], &xml),
        "remove /run/vrdma/status.sock /run/vrdma/vm1.sock\n"
    );
    for (part, instead) in [("\"socket\":", "\"other\":"), ("{\"driver\"", "{\"driver")] {
        let output = hook(["prepare", "begin"], &xml.replace(part, instead));
        assert!(!output.status.success(), "{instead}");
    }
}

#[test]
fn the_hook_passes_options_on_and_knows_the_interface_of_each_card() {
    let xml = "<domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
        <metadata><card xmlns='urn:virtio-rdma:libvirt' options='network=blue,gids=mac'/></metadata>\
        <devices>\
        <interface type='bridge'><mac address='52:54:00:00:00:01'/></interface>\
        <interface type='bridge'><mac address='52:54:00:00:00:02'/></interface>\
        </devices><qemu:commandline>\
        <qemu:arg value='-chardev'/><qemu:arg value='socket,path=/run/vrdma/b,id=second'/>\
        <qemu:arg value='-chardev'/><qemu:arg value='socket,id=first,path=/run/vrdma/a'/>\
        <qemu:arg value='-device'/><qemu:arg value='vhost-user-rdma-pci,chardev=first'/>\
        <qemu:arg value='-device'/><qemu:arg value='virtio-net-pci,netdev=other'/>\
        <qemu:arg value='-device'/><qemu:arg value='vhost-user-rdma-pci,chardev=second'/>\
        </qemu:commandline></domain>";
    let asked = asked(["prepare", "begin"], xml);
    let devices: Vec<_> = asked
        .lines()
        .filter_map(|line| line.split(' ').nth(2))
        .collect();
    assert_eq!(
        devices,
        [
            "/run/vrdma/a,mac=52:54:00:00:00:01,network=blue,gids=mac",
            "/run/vrdma/b,mac=52:54:00:00:00:02",
        ]
    );
}

#[test]
fn the_hook_leaves_other_vms_alone() {
    let xml = "<domain><devices/></domain>";
    assert_eq!(asked(["prepare", "begin"], xml), "");
    assert_eq!(asked(["release", "end"], xml), "");
}

#[test]
fn the_hook_keeps_a_vm_from_starting_without_its_device() {
    let refused = read("domain.xml").replace("/run/vrdma/vm1.sock", "/run/vrdma/refuse");
    for xml in [refused.as_str(), "<domain"] {
        let output = hook(["prepare", "begin"], xml);
        assert!(!output.status.success());
        assert!(!output.stderr.is_empty());
    }
    let lost = read("domain.xml").replace("chardev=rdma", "chardev=other");
    let output = hook(["prepare", "begin"], &lost);
    assert!(!output.status.success());
    // Nothing keeps one from ending.
    assert!(hook(["release", "end"], &refused).status.success());
}

#[test]
fn the_rules_of_apparmor_are_for_the_paths_of_the_document() {
    let xml = read("domain.xml");
    let emulator = xml
        .split_once("<emulator>")
        .and_then(|(_, rest)| rest.split_once("</emulator>"))
        .map(|(path, _)| path)
        .expect("an emulator");
    for (file, access) in [
        ("apparmor-libvirt-qemu", "rmix"),
        ("apparmor-libvirtd", "PUx"),
    ] {
        let rule = format!("\n  {emulator} {access},\n");
        assert!(read(file).contains(&rule), "{file} has no rule{rule}");
    }
    assert!(xml.contains("path=/run/vrdma/vm1.sock,"));
    assert!(read("apparmor-libvirt-qemu").contains("\n  /run/vrdma/*.sock rw,\n"));
}
