// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the process counts, as metrics in the text format of OpenMetrics 1.0, by the crate
//! `prometheus-client`: for Prometheus, and whatever reads what Prometheus reads.
//!
//! Nothing is counted for this: each time it is asked for, it is read where it is. Names, labels and
//! what they mean are in `docs/metrics.md`, and a test holds that against what the process says.
//! Counters of a device are those of the VM that is attached: they begin at 0 with each.
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use crate::adapter::Adapter;
use crate::devices::Devices;
use crate::engine::vm::{PacketEvent, Totals};
use crate::fabric::wire::egress::View;
use crate::memory::GuestMemory;
use crate::rnic::{Rnic, RnicSettings};
use crate::verbs::gid_policy::mac_text;
use crate::worker::TURNS;

mod server;

pub use server::MetricsServer;

/// What all names begin with.
const PREFIX: &str = "vhost_device_rdma";
const NANOSECONDS: f64 = 1e9;

/// The metrics of a process.
pub struct Metrics {
    registry: Registry,
}

impl Metrics {
    /// Those of these devices and their adapter.
    #[must_use]
    pub fn new(devices: Arc<Devices>) -> Self {
        let adapter = devices.adapter().clone();
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(Process { adapter, devices }));
        Self { registry }
    }

    /// All of them, as they are now.
    ///
    /// # Errors
    /// None: the text has room for all.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// What the metrics are about.
#[derive(Debug)]
struct Process {
    adapter: Arc<Adapter>,
    devices: Arc<Devices>,
}

/// A device, and what was read of its VM at one time.
struct Device<'a> {
    settings: &'a RnicSettings,
    vm: Option<Attached>,
}

struct Attached {
    rnic: Arc<Rnic>,
    totals: Totals,
    objects: [(&'static str, u64); 11],
    queue_pairs: BTreeMap<(&'static str, &'static str), u64>,
    memory: u64,
    footprint: u64,
    footprint_limit: u64,
}

impl Attached {
    fn read(rnic: &Arc<Rnic>) -> Self {
        let (objects, queue_pairs) = (rnic.counts(), rnic.queue_pairs());
        let tables = rnic.vm().tables();
        Self {
            totals: rnic.vm().totals(),
            objects,
            queue_pairs,
            memory: tables.memory.as_ref().map_or(0, GuestMemory::size),
            footprint: tables.footprint.bytes(),
            footprint_limit: tables.footprint.limit(),
            rnic: rnic.clone(),
        }
    }
}

/// One counter of a device that there is always.
type Total = (&'static str, &'static str, fn(&Totals) -> u64);

const TOTALS: &[Total] = &[
    ("sent_messages", "Messages sent.", |of| of.tx_messages),
    ("received_messages", "Messages received.", |of| {
        of.rx_messages
    }),
    (
        "rnr_naks",
        "Messages sent that met a responder without a receive.",
        |of| of.rnr_naks,
    ),
    (
        "retries",
        "Attempts to send that nobody answered in time.",
        |of| of.retries,
    ),
    (
        "qkey_violations",
        "Datagrams that came with a wrong Q_Key.",
        |of| of.qkey_violations,
    ),
];

const BYTES: &[Total] = &[
    ("sent", "Payload of messages sent.", |of| of.tx_bytes),
    ("received", "Payload of messages received.", |of| {
        of.rx_bytes
    }),
];

impl Collector for Process {
    fn encode(&self, encoder: DescriptorEncoder) -> fmt::Result {
        let mut writer = Writer(encoder);
        let version = env!("CARGO_PKG_VERSION");
        let build = [(label("version", version), 1u64)];
        writer.gauges("build_info", "Always 1.", None, build)?;
        if let Some(bytes) = self.adapter.resident_bytes() {
            let help = "Resident memory of the process without that of guests.";
            writer.gauges("resident", help, Some(&Unit::Bytes), [(Vec::new(), bytes)])?;
        }
        self.workers(&mut writer)?;
        if let Some(wire) = self.adapter.wire() {
            self.wire(&mut writer, wire)?;
        }
        let rnics = self.adapter.rnics();
        let of = |settings| {
            let rnic = rnics.iter().find(|rnic| rnic.is_of(settings));
            let vm = rnic.map(Attached::read);
            Device { settings, vm }
        };
        let settings = self.devices.settings();
        let devices: Vec<_> = settings.iter().map(of).collect();
        states(&mut writer, &devices)?;
        traffic(&mut writer, &devices)?;
        objects(&mut writer, &devices)
    }
}

impl Process {
    fn workers(&self, writer: &mut Writer<'_>) -> fmt::Result {
        let workers = || {
            let all = self.adapter.each_worker();
            all.map(|worker| (label("worker", worker.index.to_string()), worker))
        };
        let asleep = workers().map(|(labels, worker)| (labels, u64::from(worker.is_asleep())));
        writer.gauges("worker_asleep", "1 if the worker sleeps.", None, asleep)?;
        for (at, name, help) in [
            (
                0,
                "worker_polls",
                "Times that the worker polled a queue pair.",
            ),
            (1, "worker_sleeps", "Times that the worker went to sleep."),
            (
                2,
                "worker_back_offs",
                "Short waits between looks for work, for which guests need not notify.",
            ),
            (
                3,
                "worker_wake_ups",
                "Times that a guest, or a message of QEMU, woke the worker.",
            ),
            (
                4,
                "worker_doorbells",
                "Doorbells that the worker saw ringing.",
            ),
        ] {
            let counts = workers().filter_map(|(labels, worker)| {
                let (_, count) = *worker.counts().get(at)?;
                Some((labels, count))
            });
            writer.counters(name, help, None, counts)?;
        }
        let on_cpu = workers().filter_map(|(labels, worker)| {
            let time = worker.time_on_cpu()?;
            Some((labels, time.as_secs_f64()))
        });
        let help = "Time that the worker was on a CPU.";
        writer.counters("worker_cpu", help, Some(&Unit::Seconds), on_cpu)?;
        let help = "Turns of the worker with work, from one look at all VMs to the next.";
        let unit = Some(&Unit::Seconds);
        let kind = MetricType::Histogram;
        let mut family = writer
            .0
            .encode_descriptor("worker_turn", help, unit, kind)?;
        for (labels, worker) in workers() {
            let (counts, nanoseconds) = worker.turns();
            let bounds = TURNS.iter().map(|bound| *bound as f64 / NANOSECONDS);
            let bounds = bounds.chain([f64::INFINITY]);
            let buckets: Vec<_> = bounds.zip(counts.iter().copied()).collect();
            let sum = nanoseconds as f64 / NANOSECONDS;
            let count = counts.iter().sum();
            let mut metric = family.encode_family(&labels)?;
            metric.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
        Ok(())
    }

    fn wire(&self, writer: &mut Writer<'_>, wire: &View) -> fmt::Result {
        let events = wire.counters.list();
        let events = events.map(|(event, count)| (label("event", event), count));
        let help = "What happened on the wire, by the names of the status.";
        writer.counters("wire_events", help, None, events)?;
        let dropped = wire.counters.dropped();
        let dropped = dropped.map(|(reason, count)| (label("reason", reason), count));
        let help = "Frames that came and were dropped.";
        writer.counters("wire_dropped_frames", help, None, dropped)
    }
}

/// What devices are, and whether they can be used.
fn states(writer: &mut Writer<'_>, devices: &[Device<'_>]) -> fmt::Result {
    let all = || devices.iter().map(|of| (of.labels(), of));
    let about = all().map(|(labels, of)| {
        let labels = and(&labels, "mac", mac_text(&of.settings.mac));
        (and(&labels, "network", of.settings.network.clone()), 1u64)
    });
    writer.gauges("device_info", "Always 1.", None, about)?;
    let attached = all().map(|(labels, of)| (labels, u64::from(of.vm.is_some())));
    let help = "1 if a front end is attached to the device.";
    writer.gauges("device_attached", help, None, attached)?;
    let up = all().map(|(labels, of)| (labels, u64::from(of.settings.link.is_up())));
    writer.gauges("link_up", "1 if the link of the device is up.", None, up)?;
    let up =
        attached_to(devices).map(|(labels, vm)| (labels, u64::from(vm.rnic.vm().port_is_up())));
    let help = "1 if link and port are up: the driver has a say, too.";
    writer.gauges("port_up", help, None, up)
}

fn traffic(writer: &mut Writer<'_>, devices: &[Device<'_>]) -> fmt::Result {
    for (list, unit) in [(TOTALS, None), (BYTES, Some(&Unit::Bytes))] {
        for (name, help, of) in list {
            let counts = attached_to(devices).map(|(labels, vm)| (labels, of(&vm.totals)));
            writer.counters(name, help, unit, counts)?;
        }
    }
    let errors = attached_to(devices).flat_map(|(labels, vm)| {
        let errors = vm.rnic.vm().errors();
        let of = |(status, count)| (and(&labels, "status", status), count);
        errors.map(of).collect::<Vec<_>>()
    });
    let help = "Work requests that ended in error, by the status of their completion.";
    writer.counters("failed_work_requests", help, None, errors)?;
    let events = attached_to(devices).flat_map(|(labels, vm)| {
        PacketEvent::ALL.map(|(event, name)| {
            let count = vm.rnic.vm().packet_events(event);
            (and(&labels, "event", name), count)
        })
    });
    let help = "What happened to packets of the VM, by the names of hardware counters.";
    writer.counters("packet_events", help, None, events)?;
    let contended = attached_to(devices)
        .map(|(labels, vm)| (labels, vm.totals.contended_ns as f64 / NANOSECONDS));
    let help = "Time of workers that the VM had while others had work, too.";
    writer.counters("contended_worker", help, Some(&Unit::Seconds), contended)
}

/// What a VM has, and may have.
fn objects(writer: &mut Writer<'_>, devices: &[Device<'_>]) -> fmt::Result {
    let objects = attached_to(devices).flat_map(|(labels, vm)| {
        let of = |(kind, count)| (and(&labels, "kind", kind), count);
        vm.objects.map(of)
    });
    let help = "Objects that the VM has created and not destroyed.";
    writer.gauges("objects", help, None, objects)?;
    let queue_pairs = attached_to(devices).flat_map(|(labels, vm)| {
        let of = |(&(kind, state), count): (&(&'static str, &'static str), &u64)| {
            let labels = and(&and(&labels, "type", kind), "state", state);
            (labels, *count)
        };
        vm.queue_pairs.iter().map(of).collect::<Vec<_>>()
    });
    let help = "Queue pairs by their type and state.";
    writer.gauges("queue_pairs", help, None, queue_pairs)?;
    for (name, help, of) in [
        (
            "footprint",
            "Memory of the process that the VM takes.",
            (|vm| vm.footprint) as fn(&Attached) -> u64,
        ),
        ("footprint_limit", "Most of that that it may take.", |vm| {
            vm.footprint_limit
        }),
        (
            "guest_memory",
            "Memory of the VM that the process sees.",
            |vm| vm.memory,
        ),
        (
            "guest_memory_limit",
            "Most of that that it may share.",
            |vm| vm.rnic.settings.limits.memory(),
        ),
    ] {
        let bytes = attached_to(devices).map(|(labels, vm)| (labels, of(vm)));
        writer.gauges(name, help, Some(&Unit::Bytes), bytes)?;
    }
    Ok(())
}

/// Labels, each with its value.
type Labels = Vec<(&'static str, Cow<'static, str>)>;

fn label(name: &'static str, value: impl Into<Cow<'static, str>>) -> Labels {
    vec![(name, value.into())]
}

/// One more label.
fn and(labels: &Labels, name: &'static str, value: impl Into<Cow<'static, str>>) -> Labels {
    let mut labels = labels.clone();
    labels.push((name, value.into()));
    labels
}

impl Device<'_> {
    fn labels(&self) -> Labels {
        label("device", self.settings.name.clone())
    }
}

fn attached_to<'a>(devices: &'a [Device<'a>]) -> impl Iterator<Item = (Labels, &'a Attached)> {
    let attached = |of: &'a Device<'a>| Some((of.labels(), of.vm.as_ref()?));
    devices.iter().filter_map(attached)
}

/// Writes families of metrics: each has a name, and a value for each set of labels.
struct Writer<'a>(DescriptorEncoder<'a>);

impl Writer<'_> {
    fn counters<V: EncodeCounterValue>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        values: impl IntoIterator<Item = (Labels, V)>,
    ) -> fmt::Result {
        let kind = MetricType::Counter;
        let mut family = self.0.encode_descriptor(name, help, unit, kind)?;
        for (labels, value) in values {
            let mut metric = family.encode_family(&labels)?;
            metric.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
        }
        Ok(())
    }

    fn gauges<V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        values: impl IntoIterator<Item = (Labels, V)>,
    ) -> fmt::Result {
        let kind = MetricType::Gauge;
        let mut family = self.0.encode_descriptor(name, help, unit, kind)?;
        for (labels, value) in values {
            family.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }
}
