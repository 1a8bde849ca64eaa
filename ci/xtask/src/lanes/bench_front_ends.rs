// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lane `bench-front-ends`: the device by vfio-user beside the device by vhost-user, between two
//! VMs each.
//!
//! The VMs with vfio-user and those with vhost-user that they are compared with have the same QEMU,
//! as Debian has built it. Others have the QEMU with `vhost-user-rdma-pci`, another version: how it
//! emulates processors is no matter of front ends, and its figures are there to tell the one from
//! the other. All VMs are on one device process, and take turns.

use anyhow::{Context, Result};
use virtio_rdma_bench::{Better, Figure, Part, Target};

use super::bench::{judged, measurement, perftest, set_clocks, Measurement, Quantity, RdmaDevice};
use super::{Case, Fixture, Lane};
use crate::images::{Image, Kernel};
use crate::vm::{kvm, FrontEnd, Hosts};

/// How often everything is measured.
const ROUNDS: usize = 7;

/// How much longer a run is than one beside Soft-RoCE: what differs is less.
const LONGER: u32 = 5;

/// The lane.
pub fn lane() -> Lane {
    Lane {
        name: "bench-front-ends",
        about: "latency, bandwidth and message rate by vfio-user beside vhost-user",
        with_device: true,
        vms: 2 * FRONT_ENDS as u8,
        memory: 512,
        bare: 0,
        hosts: Hosts::One,
        front_end: FrontEnd::Each,
        image: Image::Plain,
        runs: || vec![(Kernel::Trixie, CASES.to_vec())],
    }
}

const FRONT_ENDS: usize = FrontEnd::EACH.len();

const CASES: &[Case] = &[
    Case {
        name: "how they have the device",
        run: set_up,
    },
    Case {
        name: "rounds",
        run: rounds,
    },
];

/// A READ keeps one VM busy, and leaves a CPU of two to the device, whose worker then polls. For
/// the latency of the others, both VMs wait busily, and the worker sleeps: one of two messages needs
/// a notification, and the answer to it comes while the worker polls on for a moment.
const MEASUREMENTS: &[Measurement] = &[
    measurement("read", Quantity::Latency, 8),
    measurement("write", Quantity::Latency, 8),
    measurement("send", Quantity::Latency, 8),
    measurement("write", Quantity::Bandwidth, 1 << 20),
    measurement("write", Quantity::Rate, 64),
];

/// How often a guest notifies the device in a round, for nothing but to see how long that takes it.
const NOTIFICATIONS: u32 = 1000;

/// The names of the two that vfio-user is compared with.
const SAME_QEMU: &str = "vhost-user, same QEMU";
const OUR_QEMU: &str = "vhost-user, our QEMU";

/// What is wanted beside vhost-user with the same QEMU.
fn target(quantity: Quantity) -> Target {
    match quantity {
        Quantity::Latency => Target::Max(1.1),
        Quantity::Bandwidth | Quantity::Rate => Target::Min(0.9),
    }
}

/// The VMs of a front end, by its place in [`FrontEnd::EACH`].
fn vms(at: usize) -> (u8, u8) {
    let first = 2 * at as u8 + 1;
    (first, first + 1)
}

/// Says what is what.
fn set_up(fixture: &mut Fixture) -> Result<()> {
    set_clocks(fixture)?;
    let mut versions = Vec::new();
    for at in 0..FRONT_ENDS {
        let (first, second) = vms(at);
        for number in [first, second] {
            let vm = fixture.vm(number)?;
            vm.sh("/payload/wait-active vrdma0 && ibv_devinfo -d vrdma0")?;
        }
        let version = fixture.vm_mut(first)?.qmp("query-version")?;
        let part = |name: &str| version["qemu"][name].as_u64().unwrap_or_default();
        let [major, minor, micro] = ["major", "minor", "micro"].map(part);
        versions.push(format!("{major}.{minor}.{micro}"));
    }
    let accelerator = if kvm() { "KVM" } else { "TCG" };
    let [by_vfio_user, by_test_device, by_ours] = versions.as_slice() else {
        anyhow::bail!("not three versions of QEMU");
    };
    anyhow::ensure!(by_vfio_user == by_test_device, "two versions of one QEMU");
    fixture.note(format!(
        "By front end, between VMs: vfio-user is `vfio-user-pci` of QEMU {by_vfio_user} as Debian \
         has built it. \"{SAME_QEMU}\" is that QEMU's `vhost-user-test-device-pci`, with the same \
         guest, whose driver is told another device id. \"{OUR_QEMU}\" is `vhost-user-rdma-pci` of \
         QEMU {by_ours}: how it differs from the one before is QEMU's affair, whose {accelerator} \
         runs the guests. Both VMs of a ping-pong wait busily: on two CPUs the device has none of \
         its own then, its worker sleeps, and a message needs a notification, which by vfio-user is \
         a message to the process. With READs the worker polls. *Notification* is how long the write \
         to the device's register takes the guest, with what takes its CPU from it meanwhile. Two VMs \
         with each are on one device process and take turns; each figure is the median of {ROUNDS} \
         runs."
    ));
    Ok(())
}

fn rounds(fixture: &mut Fixture) -> Result<()> {
    let mut values: Values = vec![Default::default(); MEASUREMENTS.len()];
    let mut counts: Notifications = vec![Default::default(); MEASUREMENTS.len()];
    let mut taken = Runs::default();
    for round in 0..ROUNDS {
        let of_each = MEASUREMENTS.iter().zip(&mut values).zip(&mut counts);
        for ((measurement, of), counts) in of_each {
            // Each is the first as often as the others.
            for turn in 0..FRONT_ENDS {
                let at = (round + turn) % FRONT_ENDS;
                let before = fixture.bed.counted("kicks")?;
                let value = measure(fixture, vms(at), *measurement)?;
                if let Some(count) = counts.get_mut(at) {
                    *count += fixture.bed.counted("kicks")?.saturating_sub(before);
                }
                println!(
                    "         round {}, {:?}: {} {value:.3} {}",
                    round + 1,
                    FrontEnd::EACH.get(at),
                    measurement.name(),
                    measurement.quantity.unit()
                );
                if let Some(of) = of.get_mut(at) {
                    of.push(value);
                }
            }
        }
        for (at, of) in taken.iter_mut().enumerate() {
            of.push(notification(fixture, vms(at).0)?);
        }
    }
    fixture.note(notifications(&counts));
    let all = figures(&values).into_iter();
    for figure in all.chain(of_notifications(&taken)) {
        if figure.target.is_some() {
            fixture.sub_case(judged(&figure));
        }
        fixture.measured(figure);
    }
    Ok(())
}

/// How often a measurement has something moved in a run.
fn iterations(measurement: Measurement) -> u32 {
    LONGER * measurement.iterations(RdmaDevice::Ours)
}

fn measure(fixture: &mut Fixture, vms: (u8, u8), measurement: Measurement) -> Result<f64> {
    let devices = [RdmaDevice::Ours; 2];
    let (size, iterations) = (measurement.size, iterations(measurement));
    let arguments = format!("-s {size} -n {iterations}");
    let table = perftest(fixture, vms, devices, &measurement.tool(), &arguments)?;
    measurement.value(&table, size)
}

/// How long it takes a guest to notify a worker that sleeps, µs.
fn notification(fixture: &Fixture, vm: u8) -> Result<f64> {
    let vm = fixture.vm(vm)?;
    let text = vm.sh(&format!("/payload/notify.py {NOTIFICATIONS}"))?;
    let nanoseconds: f64 = text.trim().parse().context("no time")?;
    Ok(nanoseconds / 1000.0)
}

/// For each measurement, how often a guest woke the worker in all rounds, with each front end.
type Notifications = Vec<[u64; FRONT_ENDS]>;

/// Says how many notifications there were, which is the same with all front ends unless one makes
/// the worker sleep more.
fn notifications(counts: &Notifications) -> String {
    let of = |(measurement, counts): (&Measurement, &[u64; FRONT_ENDS])| {
        let all = f64::from(iterations(*measurement)) * ROUNDS as f64;
        let [by_vfio_user, by_test_device, by_ours] = counts.map(|count| count as f64 / all);
        format!(
            "{} ({}) {by_vfio_user:.2}, {by_test_device:.2} and {by_ours:.2}",
            measurement.name(),
            measurement.quantity.section()
        )
    };
    let of_each: Vec<_> = MEASUREMENTS.iter().zip(counts).map(of).collect();
    format!(
        "Notifications that woke the worker, for each iteration of perftest, by vfio-user, by \
         {SAME_QEMU}, and by {OUR_QEMU}: {}. An iteration of a latency is a message each way, or a \
         READ.",
        of_each.join("; ")
    )
}

/// Values of each front end.
type Runs = [Vec<f64>; FRONT_ENDS];
/// Those of each measurement.
type Values = Vec<Runs>;

/// What the rounds come to.
fn figures(values: &Values) -> Vec<Figure> {
    let of = |(measurement, runs): (&Measurement, &Runs)| {
        let quantity = measurement.quantity;
        beside(runs, Some(target(quantity)), |runs, how| {
            Figure::new(
                Part::Vm,
                &format!("{} by front end", quantity.section()),
                &format!("{}, by {how}", measurement.name()),
                quantity.unit(),
                quantity.better(),
                runs,
            )
        })
    };
    MEASUREMENTS.iter().zip(values).flat_map(of).collect()
}

/// What notifications come to. There is no target for them.
fn of_notifications(taken: &Runs) -> [Figure; FRONT_ENDS] {
    beside(taken, None, |runs, how| {
        Figure::new(
            Part::Vm,
            "notification by front end",
            &format!("of a worker that sleeps, by {how}"),
            "µs",
            Better::Lower,
            runs,
        )
    })
}

/// The figures of each front end, which `figure` makes of values and its name, beside the others.
fn beside(
    [by_vfio_user, by_test_device, by_ours]: &Runs,
    target: Option<Target>,
    figure: impl Fn(&[f64], &str) -> Figure,
) -> [Figure; FRONT_ENDS] {
    let by = figure(by_vfio_user, "vfio-user");
    let same_qemu = by.clone().beside(SAME_QEMU, by_test_device);
    [
        match target {
            Some(target) => same_qemu.target(target),
            None => same_qemu,
        },
        by.beside(OUR_QEMU, by_ours),
        figure(by_test_device, SAME_QEMU).beside(OUR_QEMU, by_ours),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn front_ends_are_compared_under_the_same_qemu() {
        let values = vec![[vec![10.5], vec![10.0], vec![5.0]]; MEASUREMENTS.len()];
        let figures = figures(&values);
        let judged: Vec<_> = figures.iter().filter(|of| of.target.is_some()).collect();
        assert_eq!(judged.len(), MEASUREMENTS.len());
        for figure in judged {
            assert_eq!(figure.met, Some(true), "{}", figure.name);
            assert_eq!(figure.peer.as_ref().unwrap().name, SAME_QEMU);
        }
        let slower = vec![[vec![12.0], vec![10.0], vec![5.0]]; MEASUREMENTS.len()];
        let met = super::figures(&slower).into_iter().filter_map(|of| of.met);
        assert_eq!(met.collect::<Vec<_>>(), [false, false, false, true, true]);
    }

    #[test]
    fn notifications_are_counted_by_front_end() {
        let one = u64::from(iterations(MEASUREMENTS[1])) * ROUNDS as u64;
        let mut counts = vec![[0; FRONT_ENDS]; MEASUREMENTS.len()];
        counts[1] = [one, one / 2, 0];
        let text = notifications(&counts);
        assert!(
            text.contains("WRITE 8 B (latency) 1.00, 0.50 and 0.00;"),
            "{text}"
        );
    }

    #[test]
    fn two_vms_have_each_front_end() {
        assert_eq!([vms(0), vms(2)], [(1, 2), (5, 6)]);
        assert_eq!(lane().vms, 6);
    }
}
