// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `packages`: the Debian packages on a Debian 13 as its installer leaves it, from their
//! installation by apt to their removal, by the commands of `docs/install.md`.
//!
//! Its cases follow each other: each begins with what the one before it has left.

use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::{Case, Fixture, Lane, Skip};
use crate::book::Page;
use crate::images::{self, Image, Kernel};
use crate::vm::{wait_for, FrontEnd, Hosts, Vm, SHORT};

/// How long apt may take: without KVM, most of it is DKMS, which compiles for two kernels.
const APT: Duration = Duration::from_secs(3600);
/// How long a guest may take to power off.
const POWER_OFF: Duration = Duration::from_secs(120);

/// What this project has for where the card is.
const GUEST: [&str; 3] = ["virtio-rdma-dkms", "libvirtio-rdma1", "libvirtio-rdma-dev"];
/// What belongs to where VMs are run. Here, that is the guest, too.
const HOST: &str = "vhost-device-rdma";

const SERVICE: &str = "vhost-device-rdma.service";

/// The lane.
pub fn lane() -> Lane {
    Lane {
        name: "packages",
        about: "the Debian packages on a stock Debian 13: installed, used, upgraded, removed",
        with_device: true,
        vms: 1,
        memory: 2048,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::VhostUser,
        image: Image::System,
        runs: || vec![(Kernel::Trixie, CASES.to_vec())],
    }
}

const CASES: &[Case] = &[
    Case {
        name: "apt installs the host's package, which starts nothing",
        run: host_installs,
    },
    Case {
        name: "the service serves what is configured, and ends cleanly",
        run: service_serves,
    },
    Case {
        name: "the service is told to start by those who connect",
        run: sockets_activate,
    },
    Case {
        name: "the service has an interface of the host, also when that is another one of its name",
        run: service_has_interface,
    },
    Case {
        name: "apt installs the guest's packages, and DKMS builds for both kernels",
        run: guest_installs,
    },
    Case {
        name: "the card is there after a reboot, with both kernels",
        run: card_after_reboot,
    },
    Case {
        name: "programs are built with the library",
        run: library_links,
    },
    Case {
        name: "an upgrade keeps card and service",
        run: upgrade,
    },
    Case {
        name: "nothing is left after a purge",
        run: purge,
    },
];

/// Runs a block of `docs/install.md`.
fn page(vm: &Vm, block: &str) -> Result<String> {
    let commands = Page::read("install.md")?
        .of_lane("packages", block)?
        .to_owned();
    let script = format!("exec 2>&1\nset -e\nexport DEBIAN_FRONTEND=noninteractive\n{commands}");
    let output = vm.run(&script, APT)?;
    let (status, text) = (output.status, output.text);
    ensure!(status == 0, "{commands}ended with {status}:\n{text}");
    Ok(text)
}

/// Has apt take this project's packages from a directory of the payload, and ask nothing.
fn use_repository(vm: &Vm, directory: &str) -> Result<()> {
    vm.sh("mkdir -p /payload && (mountpoint -q /payload || \
           mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=none payload /payload)")?;
    vm.sh(&format!(
        "mkdir -p /srv/virtio-rdma && (! mountpoint -q /srv/virtio-rdma || umount /srv/virtio-rdma) && \
         mount --bind /payload/{directory} /srv/virtio-rdma"
    ))?;
    vm.sh(
        "printf 'APT::Get::Assume-Yes \"true\";\nAPT::Install-Recommends \"false\";\n' \
         >/etc/apt/apt.conf.d/90-asks-nothing",
    )?;
    page(vm, "repository").map(drop)
}

/// A case cannot go on if the one before it has failed.
fn after(vm: &Vm, package: &str) -> Result<()> {
    let query = format!("dpkg-query -W -f '${{db:Status-Status}}' {package}");
    let there = vm.run(&query, SHORT)?.text.trim() == "installed";
    if !there {
        return Err(Skip(format!("{package} is not installed")).into());
    }
    Ok(())
}

/// What `systemctl show` says of a unit.
fn property(vm: &Vm, unit: &str, name: &str) -> Result<String> {
    let text = vm.sh(&format!("systemctl show -P {name} {unit}"))?;
    Ok(text.trim().to_owned())
}

/// Files and users, for comparison.
fn traces(vm: &Vm) -> Result<String> {
    vm.sh(
        "find / -xdev '(' -iname '*vhost-device-rdma*' -o -iname '*virtio[-_]rdma*' -o -name vrdma ')' \
           -not -path '/proc/*' -not -path '/srv/*' -not -path '/etc/apt/*' -not -path '/var/lib/apt/*' \
           -not -path '/etc/virtio-rdma*' 2>/dev/null | sort; \
         getent passwd vhost-device-rdma; ls -d /run/vrdma 2>/dev/null; true",
    )
}

fn host_installs(fixture: &mut Fixture) -> Result<()> {
    let vm = fixture.vm(1)?;
    use_repository(vm, "packages")?;
    let before = traces(vm)?;
    ensure!(before.is_empty(), "there are traces before: {before}");
    page(vm, "host")?;
    ensure!(property(vm, SERVICE, "ActiveState")? == "inactive");
    ensure!(property(vm, SERVICE, "UnitFileState")? == "disabled");
    vm.sh("systemctl is-system-running --wait || systemctl --failed --no-legend")?;
    vm.sh("vhost-device-rdma --version && id vhost-device-rdma | grep -w kvm")?;
    vm.sh(
        "cd /usr/share/doc/vhost-device-rdma && \
           ls README.md device/README.md docs/README.md docs/libvirt/hook docs/grafana/*.json docs/ci/rdma.yml",
    )?;
    let owner = vm.sh("stat -c '%U %a' /run/vrdma /run/vrdma/operator")?;
    ensure!(
        owner == "vhost-device-rdma 755\nvhost-device-rdma 700\n",
        "directories of sockets: {owner}"
    );
    // Without a device it waits for one.
    vm.sh(&format!("systemctl start {SERVICE}"))?;
    ensure!(property(vm, SERVICE, "StatusText")? == "Serving 0 devices");
    vm.sh(&format!("systemctl stop {SERVICE}"))?;
    let exposure = vm.sh(&format!("systemd-analyze security --no-pager {SERVICE}"))?;
    let last = exposure.lines().last().unwrap_or_default();
    let level = last
        .split_ascii_whitespace()
        .find_map(|word| word.parse::<f64>().ok());
    ensure!(level.is_some_and(|level| level <= 2.0), "{last}");
    fixture.figure("exposure", level.unwrap_or(10.0));
    Ok(())
}

/// Writes the example of the configuration file without its marks of a comment.
const CONFIGURE: &str =
    "sed -i -e 's/^# \\(\\[\\[device\\]\\]\\)/\\1/' -e 's/^# \\([a-z]* = \\)/\\1/' \
    /etc/vhost-device-rdma.toml && grep -A 4 '^.*device' /etc/vhost-device-rdma.toml";

/// What the process says of itself.
const STATUS: &str = "vhost-device-rdma status /run/vrdma/operator/status.sock";

fn service_serves(fixture: &mut Fixture) -> Result<()> {
    let vm = fixture.vm(1)?;
    after(vm, HOST)?;
    vm.sh(CONFIGURE)?;
    page(vm, "service")?;
    // A third device comes and goes.
    let list = "vhost-device-rdma list /run/vrdma/operator/status.sock";
    let reload = format!("systemctl reload {SERVICE} && {list}");
    let third = "[[device]]\\nsocket = \"/run/vrdma/vm3.sock\"\\nmac = \"52:54:00:12:34:03\"\\n";
    let add = format!("cp /etc/vhost-device-rdma.toml /tmp/ && printf '\\n{third}' >>/etc/vhost-device-rdma.toml && {reload}");
    let remove = format!("cp /tmp/vhost-device-rdma.toml /etc/ && {reload}");
    for (devices, command) in [(2, list), (3, &*add), (2, &*remove)] {
        let list = vm.sh(command)?;
        ensure!(
            list.lines().count() == devices + 1,
            "not {devices} devices: {list}"
        );
    }
    vm.sh(&format!("systemctl restart {SERVICE}"))?;
    let status = vm.sh(&format!("systemctl status --no-pager {SERVICE}"))?;
    ensure!(
        status.contains("active (running)") && status.contains("Serving 2 devices"),
        "the service's status: {status}"
    );
    vm.sh(STATUS)?;
    let sockets = vm.sh("stat -c '%U:%G %a' /run/vrdma/*.sock")?;
    ensure!(
        sockets.lines().count() == 2
            && sockets
                .lines()
                .all(|line| line == "vhost-device-rdma:kvm 660"),
        "the sockets: {sockets}"
    );
    // It is its own user and nobody else, and the process's own sandbox is on.
    let pid = property(vm, SERVICE, "MainPID")?;
    let process = vm.sh(&format!("cat /proc/{pid}/task/*/status"))?;
    for (name, value) in [
        ("CapEff", "0000000000000000"),
        ("NoNewPrivs", "1"),
        ("Seccomp", "2"),
    ] {
        let all = process.lines().filter_map(|line| line.strip_prefix(name));
        let values: Vec<_> = all.filter_map(|rest| rest.strip_prefix(":\t")).collect();
        ensure!(
            !values.is_empty() && values.iter().all(|is| *is == value),
            "{name} of its threads: {values:?}"
        );
    }
    // The watchdog hears of it: longer than it waits without.
    std::thread::sleep(Duration::from_secs(35));
    ensure!(property(vm, SERVICE, "ActiveState")? == "active");
    ensure!(property(vm, SERVICE, "NRestarts")? == "0");
    // Killed, it comes back.
    vm.sh(&format!("systemctl kill -s KILL {SERVICE}"))?;
    let back = || {
        let again = property(vm, SERVICE, "NRestarts")? == "1"
            && property(vm, SERVICE, "ActiveState")? == "active";
        Ok(again.then_some(()))
    };
    wait_for(SHORT, back)?.context("it does not start again after SIGKILL")?;
    vm.sh(STATUS)?;
    vm.sh(&format!("systemctl stop {SERVICE}"))?;
    ensure!(property(vm, SERVICE, "Result")? == "success");
    ensure!(property(vm, SERVICE, "ExecMainStatus")? == "0");
    let left = vm.sh("find /run/vrdma -type s")?;
    ensure!(left.is_empty(), "sockets are left: {left}");
    let log = vm.sh("journalctl -o cat --no-pager | sed -n -E '/type=1326|no Landlock/p'")?;
    ensure!(log.is_empty(), "the sandbox has not all it needs: {log}");
    Ok(())
}

fn sockets_activate(fixture: &mut Fixture) -> Result<()> {
    let vm = fixture.vm(1)?;
    after(vm, HOST)?;
    let example = "/usr/share/doc/vhost-device-rdma/examples/vhost-device-rdma.socket";
    vm.sh(&format!(
        "cp {example} /etc/systemd/system/ && systemctl daemon-reload && \
         systemctl start vhost-device-rdma.socket"
    ))?;
    ensure!(property(vm, SERVICE, "ActiveState")? == "inactive");
    let connect = "python3 -c 'import socket, time; s = socket.socket(socket.AF_UNIX); \
                   s.connect(\"/run/vrdma/vm2.sock\"); time.sleep(1)'";
    vm.sh(connect)?;
    let active = || Ok((property(vm, SERVICE, "ActiveState")? == "active").then_some(()));
    wait_for(SHORT, active)?.context("nobody started it")?;
    vm.sh(STATUS)?;
    // The sockets stay when it goes, and bring it back.
    vm.sh(&format!(
        "systemctl stop {SERVICE} && test -S /run/vrdma/vm1.sock"
    ))?;
    vm.sh(connect)?;
    wait_for(SHORT, active)?.context("nobody started it again")?;
    vm.sh(&format!(
        "systemctl stop vhost-device-rdma.socket {SERVICE} && \
         rm /etc/systemd/system/vhost-device-rdma.socket && systemctl daemon-reload"
    ))?;
    let left = vm.sh("find /run/vrdma -type s")?;
    ensure!(left.is_empty(), "sockets are left: {left}");
    vm.sh(&format!("systemctl start {SERVICE}")).map(drop)
}

/// A device with `netdev`: what joins the two is there after each start.
fn service_has_interface(fixture: &mut Fixture) -> Result<()> {
    let vm = fixture.vm(1)?;
    after(vm, HOST)?;
    let add = "ip tuntap add dev vm1 mode tap vnet_hdr && ip link set vm1 up";
    vm.sh(&format!("modprobe tun && {add}"))?;
    vm.sh("cp /etc/vhost-device-rdma.toml /tmp/ && sed -i \
           '/^mac = .52:54:00:12:34:01/a netdev = \"vm1\"' /etc/vhost-device-rdma.toml")?;
    let joined = || -> Result<()> {
        let number = vm.sh("cat /sys/class/net/vm1/ifindex")?;
        vm.sh(&format!("ip link show dev rdma-{}", number.trim()))?;
        let status = vm.sh(STATUS)?;
        ensure!(status.contains("\"wire\":"), "it has no wire: {status}");
        ensure!(property(vm, SERVICE, "StatusText")? == "Serving 2 devices");
        Ok(())
    };
    page(vm, "netdev")?;
    joined()?;
    // The interface is another one after a reboot, or a new start of its VM.
    vm.sh(&format!(
        "ip link delete vm1 && {add} && systemctl restart {SERVICE}"
    ))?;
    joined()?;
    // Without one it does not start, and says why.
    vm.sh(&format!(
        "ip link delete vm1 && ! systemctl restart {SERVICE}"
    ))?;
    let log = vm.sh(&format!("journalctl -o cat --no-pager -u {SERVICE} -n 20"))?;
    ensure!(log.contains("cannot prepare vm1"), "what it says: {log}");
    vm.sh(&format!(
        "rm -r /etc/systemd/system/{SERVICE}.d && cp /tmp/vhost-device-rdma.toml /etc/ && \
         for tap in $(ip -o link show | grep -o ' rdma-[0-9]*'); do ip link delete $tap; done && \
         systemctl daemon-reload && systemctl reset-failed {SERVICE} && systemctl start {SERVICE}"
    ))
    .map(drop)
}

/// The kernels of the guest, as `uname -r` has them.
fn releases(vm: &Vm) -> Result<Vec<String>> {
    let text = vm.sh("cat /etc/virtio-rdma/trixie /etc/virtio-rdma/backports")?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// DKMS has the module for both kernels.
fn built_for_both(vm: &Vm) -> Result<()> {
    let status = vm.sh("dkms status")?;
    for release in releases(vm)? {
        let found = status
            .lines()
            .filter(|line| line.starts_with("virtio-rdma/") && line.contains(&release))
            .any(|line| line.ends_with(": installed"));
        ensure!(found, "no module for {release}: {status}");
        vm.sh(&format!("modinfo -k {release} virtio_rdma"))?;
    }
    Ok(())
}

/// The card is found by the verbs, with an active port.
fn card_is_there(vm: &Vm) -> Result<()> {
    let active = || {
        let output = vm.run("ibv_devinfo", SHORT)?;
        Ok((output.status == 0 && output.text.contains("PORT_ACTIVE")).then_some(output.text))
    };
    let found = wait_for(SHORT, active)?;
    let text = match found {
        Some(text) => text,
        None => vm.sh("ibv_devinfo 2>&1; lsmod; lspci -nn")?,
    };
    ensure!(text.contains("vendor_part_id"), "no card is there: {text}");
    ensure!(text.contains("PORT_ACTIVE"), "its port is down: {text}");
    Ok(())
}

fn guest_installs(fixture: &mut Fixture) -> Result<()> {
    let vm = fixture.vm(1)?;
    use_repository(vm, "packages")?;
    let start = std::time::Instant::now();
    page(vm, "guest")?;
    built_for_both(vm)?;
    let seconds = start.elapsed().as_secs();
    fixture.figure("install_seconds", seconds);
    let vm = fixture.vm(1)?;
    // It is loaded by who finds the device, which is the kernel at boot, and here somebody by hand.
    page(vm, "module")?;
    card_is_there(vm)
}

/// Powers the guest off, and on with another kernel.
fn reboot(fixture: &mut Fixture, kernel: Kernel) -> Result<()> {
    let image = images::system_kernel(fixture.root(), kernel);
    let vm = fixture.vm_mut(1)?;
    // The agent ends in the middle of it, so nobody waits for the command, which would be killed if it
    // were dropped. Without D-Bus, `systemctl poweroff` finds nobody to ask.
    let command =
        vm.spawn("systemctl start --no-block --job-mode=replace-irreversibly poweroff.target")?;
    vm.wait_end(POWER_OFF)?;
    drop(command);
    vm.set_kernel(&image);
    vm.start_again()?;
    // Until all has started. Its status also tells of Debian's own services that have not, which are
    // no matter here: the caller looks at the card and the service.
    vm.run("systemctl is-system-running --wait", SHORT)?;
    Ok(())
}

fn card_after_reboot(fixture: &mut Fixture) -> Result<()> {
    after(fixture.vm(1)?, "virtio-rdma-dkms")?;
    for kernel in [Kernel::Backports, Kernel::Trixie] {
        reboot(fixture, kernel)?;
        let vm = fixture.vm(1)?;
        let release = vm.sh("uname -r")?;
        let wanted = vm.sh(&format!("cat /etc/virtio-rdma/{kernel}"))?;
        ensure!(release == wanted, "it runs {release}, not {wanted}");
        card_is_there(vm)?;
        let failed = vm.sh("systemctl --failed --no-legend")?;
        ensure!(failed.is_empty(), "services failed: {failed}");
        ensure!(
            property(vm, SERVICE, "ActiveState")? == "active",
            "the service is not back"
        );
        // A message goes from this guest to itself.
        vm.sh("ibv_rc_pingpong -g 0 -n 100 >/dev/null & sleep 2; ibv_rc_pingpong -g 0 -n 100 localhost")?;
    }
    Ok(())
}

fn library_links(fixture: &mut Fixture) -> Result<()> {
    let vm = fixture.vm(1)?;
    after(vm, "libvirtio-rdma1")?;
    // It was not mounted again.
    use_repository(vm, "packages")?;
    vm.sh("cat >program.c <<'END'\n\
         #include <stdio.h>\n\
         #include <infiniband/virtio_rdma_dv.h>\n\
         int main(void) {\n\
             struct ibv_device **list = ibv_get_device_list(NULL);\n\
             struct ibv_context *context = list && *list ? ibv_open_device(*list) : NULL;\n\
             struct virtio_rdma_dv_device_attr attr = {0};\n\
             return context ? virtio_rdma_dv_query_device(context, &attr, sizeof attr) : 1;\n\
         }\n\
         END\n")?;
    let said = page(vm, "library")?;
    ensure!(!said.contains("warning:"), "the compiler warns:\n{said}");
    vm.sh("./program && objdump -T program | grep -w VIRTIO_RDMA_1.0")?;
    vm.sh("test -e /usr/share/man/man3/virtio_rdma_dv.3.gz")
        .map(drop)
}

fn upgrade(fixture: &mut Fixture) -> Result<()> {
    let vm = fixture.vm(1)?;
    after(vm, "virtio-rdma-dkms")?;
    let pid = property(vm, SERVICE, "MainPID")?;
    use_repository(vm, "next")?;
    let start = std::time::Instant::now();
    let text = page(vm, "upgrade")?;
    let seconds = start.elapsed().as_secs();
    for package in GUEST.iter().chain([&HOST]) {
        let version = vm.sh(&format!("dpkg-query -W -f '${{Version}}' {package}"))?;
        ensure!(version.contains("+next"), "{package} is {version}: {text}");
    }
    built_for_both(vm)?;
    let modules = vm.sh("dkms status | grep -c '^virtio-rdma/'")?;
    ensure!(modules.trim() == "2", "of DKMS there are {modules} modules");
    // VMs keep what they have: the process and the module go on until somebody has time for it.
    ensure!(
        property(vm, SERVICE, "MainPID")? == pid,
        "the service was started anew"
    );
    card_is_there(vm)?;
    page(vm, "restart")?;
    vm.sh(STATUS)?;
    card_is_there(vm)?;
    fixture.figure("upgrade_seconds", seconds);
    reboot(fixture, Kernel::Trixie)?;
    let vm = fixture.vm(1)?;
    card_is_there(vm)?;
    vm.sh(STATUS).map(drop)
}

fn purge(fixture: &mut Fixture) -> Result<()> {
    let vm = fixture.vm(1)?;
    after(vm, HOST)?;
    // Nothing uses the module any more, and it goes with its package only from the disk.
    vm.sh("modprobe -r virtio_rdma")?;
    page(vm, "purge")?;
    ensure!(
        vm.run("modprobe virtio_rdma", SHORT)?.status != 0,
        "the module is still there"
    );
    ensure!(
        vm.run("pgrep vhost-device-rd", SHORT)?.status != 0,
        "the process still runs"
    );
    let left = traces(vm)?;
    // Debian keeps users, so that nobody else gets the number that files may still have.
    let unwanted: Vec<_> = left
        .lines()
        .filter(|line| !line.starts_with("vhost-device-rdma:"))
        .collect();
    ensure!(unwanted.is_empty(), "there is left: {unwanted:?}");
    Ok(())
}
