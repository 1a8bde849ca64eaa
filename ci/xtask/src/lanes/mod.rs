// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VM lanes: a lane is a list of cases that run one after the other on a bed of VMs, once for each
//! guest kernel.
//!
//! After a case the framework looks for what no case may leave behind: a device that ended, or a
//! new warning or oops in a guest's kernel log. After a case that failed it puts the bed back into
//! order, so that the next case has a fair start.

pub mod bench;
mod bench_front_ends;
mod bench_rxe;
pub mod book;
mod boot;
mod columns;
mod decode;
mod hostile;
mod interop;
mod iwarp;
mod kernel_verbs;
mod libvirt;
mod packages;
mod perftest;
mod recovery;
mod roce;
mod scale;
mod smoke;
pub mod soak;
mod software;
mod srd;
mod stock;
pub mod storage;
mod suite;
pub mod tools;
mod two_vms;
mod ulp;
mod verbs;
mod vfio_user;
mod wire;

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use serde_json::Value;
use virtio_rdma_bench::{Figure, Measurements};

use crate::artifacts::{self, Everything, Images};
use crate::images::{self, Image, Kernel};
use crate::report::{self, CaseReport, Outcome, Report};
use crate::shell;
use crate::vm::{Bed, FrontEnd, Hosts, Plan, Vm};
use soak::Soak;

/// A lane.
pub struct Lane {
    /// Its name on the command line and of its reports.
    pub name: &'static str,
    /// What it is for.
    pub about: &'static str,
    /// False for stock guests without the device.
    pub with_device: bool,
    /// How many VMs its cases want.
    pub vms: u8,
    /// Memory of each in MiB.
    pub memory: u32,
    /// For how many guests that are no VMs the device has sockets, behind those of the VMs.
    pub bare: u8,
    /// Which device process each VM has.
    pub hosts: Hosts,
    /// How QEMU has the device.
    pub front_end: FrontEnd,
    /// What they boot. Those of storage have a disk each that outlives them.
    pub image: Image,
    /// The kernels it runs on, and the cases it runs there.
    pub runs: fn() -> Vec<(Kernel, Vec<Case>)>,
}

/// The disk of a guest with storage, MiB.
const STORAGE_DISK: u64 = 512;

/// What a guest's kernel says when something has gone wrong in it, or was left behind.
const KERNEL_WARNINGS: [&str; 15] = [
    "WARNING:",
    "BUG:",
    "Oops",
    "UBSAN",
    "Call Trace",
    "blocked for more than",
    "rcu_sched detected",
    // A connection that somebody uses for ever.
    "cm_destroy_id_wait_timeout",
    "failed to drain",
    "restrack",
    "refcount",
    "still has objects",
    "to become free. Usage count",
    "kmemleak",
    "needs updating",
];

/// Does the kernel complain?
///
/// Kernel 7.3 waits no time at all for a *listener* of the connection management that is destroyed
/// while a request to it is being handled, and says at once that the time is over (`cm_destroy_id`
/// computes it from retries, of which listeners have none).
fn is_complaint(line: &str) -> bool {
    let at_once = line.contains("cm_destroy_id_wait_timeout") && line.contains("state 1 -> 0");
    !at_once && KERNEL_WARNINGS.iter().any(|word| line.contains(word))
}

/// A warning of a peer's stock kernel that is known, and none of ours: it is passed over, to the end of
/// its trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// Soft-RoCE warns of itself when packets are lost (6.12: `rxe_completer`, rxe_comp.c:827).
    Rxe,
    /// Soft-iWARP forgets RDMA READs that wait for their answers when its own end closes a connection:
    /// on the way from CLOSING to ERROR it flushes what has been posted only if it sends something just
    /// then (6.12: `siw_qp_nextstate_from_close`, drivers/infiniband/sw/siw/siw_qp.c). NFS's server,
    /// which waits for all to complete before it destroys its queue pair (`svc_rdma_free`), then still
    /// has memory regions of the queue pair in use (`WARN_ON_ONCE(qp->mrs_used > 0)`), and they stay.
    SiwReads,
}

impl Known {
    /// Which warning a trace is of, if it is a known one.
    fn find(trace: &[&str]) -> Option<Self> {
        let warning = trace.first().filter(|line| line.contains("WARNING: "))?;
        if warning.contains("drivers/infiniband/sw/rxe/") {
            return Some(Known::Rxe);
        }
        let of_qp = warning.contains("drivers/infiniband/core/verbs.c:")
            && warning.contains("ib_destroy_qp_user+");
        let of_nfs = trace.iter().any(|line| line.contains(" svc_rdma_free+"));
        (of_qp && of_nfs && has_siw(trace)).then_some(Known::SiwReads)
    }
}

/// Whether a trace is of a kernel with Soft-iWARP, and without our driver.
fn has_siw(trace: &[&str]) -> bool {
    let modules = trace.iter().find_map(|line| {
        let (_, modules) = line.split_once("Modules linked in: ")?;
        modules.split("[last unloaded").next()
    });
    // Behind a name may be flags, in parentheses.
    let names: Vec<&str> = modules
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|name| name.split('(').next())
        .collect();
    let siw = names.contains(&"siw") || names.contains(&"siw_crc");
    siw && !names.contains(&"virtio_rdma")
}

/// The first line of a kernel's log that complains, and the known warnings before it.
fn complaints(log: &str) -> (Option<usize>, Vec<Known>) {
    let lines: Vec<&str> = log.lines().collect();
    let mut known = Vec::new();
    let mut at = 0;
    while let Some(rest) = lines.get(at..).filter(|rest| !rest.is_empty()) {
        let end = rest.iter().position(|line| line.contains("---[ end trace"));
        let trace = end.and_then(|end| rest.get(..=end)).unwrap_or(rest);
        if let Some(warning) = Known::find(trace) {
            known.push(warning);
            at += trace.len();
        } else if is_complaint(rest[0]) {
            return (Some(at), known);
        } else {
            at += 1;
        }
    }
    (None, known)
}

/// The first line of a kernel's log that complains, of anything that is not [`Known`].
fn first_complaint(log: &str) -> Option<usize> {
    complaints(log).0
}

/// One case.
#[derive(Clone, Copy)]
pub struct Case {
    /// Unique in its lane.
    pub name: &'static str,
    /// What it does: an error is a failure, or a skip if it is a [`Skip`].
    pub run: fn(&mut Fixture) -> Result<()>,
}

/// The reason for which a case cannot run here, as an error.
#[derive(Debug)]
pub struct Skip(pub String);

impl std::fmt::Display for Skip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

/// All lanes.
pub fn all() -> Vec<Lane> {
    vec![
        boot::lane(),
        smoke::lane(),
        vfio_user::lane(),
        suite::lane_56(),
        suite::lane_65(),
        suite::lane_wire(),
        verbs::lane(),
        srd::lane(),
        kernel_verbs::lane(),
        scale::lane(),
        stock::lane(),
        wire::vxlan(),
        wire::switch(),
        wire::tap(),
        interop::lane(),
        interop::at_taps(),
        iwarp::lane(),
        perftest::lane(),
        ulp::lane(),
        recovery::lane(),
        hostile::lane(),
        software::lane(),
        book::lane(),
        libvirt::lane(),
        packages::lane(),
        two_vms::lane(),
        bench::lane(),
        bench::wire(),
        bench_rxe::lane(),
        bench_front_ends::lane(),
    ]
}

/// The names of all lanes and what they are for, a line each.
pub fn list() -> String {
    all()
        .iter()
        .map(|lane| format!("\n  {}: {}", lane.name, lane.about))
        .collect()
}

/// The lane of that name.
pub fn find(name: &str) -> Result<Lane> {
    all()
        .into_iter()
        .find(|lane| lane.name == name)
        .with_context(|| format!("there is no lane {name:?}; the lanes are:{}", list()))
}

/// What a case works on.
pub struct Fixture<'a> {
    /// The VMs and the device.
    pub bed: Bed,
    /// The guests' kernel.
    pub kernel: Kernel,
    /// True if it is to be shorter than usual.
    pub quick: bool,
    /// How a soak runs.
    soak: Option<Soak>,
    /// Traffic that goes on from one case to the next.
    background: Option<hostile::Background>,
    plan: Plan<'a>,
    figures: Vec<(String, Value)>,
    sub_cases: Vec<CaseReport>,
    table: report::Table,
    measured: Measurements,
    /// Known warnings of peers since the last case: their kernels are not what they were.
    remarks: Vec<String>,
    port: u16,
}

impl Fixture<'_> {
    /// A VM by its number, from 1.
    pub fn vm(&self, number: u8) -> Result<&Vm> {
        self.bed.vm(number)
    }

    /// A VM by its number, from 1.
    pub fn vm_mut(&mut self, number: u8) -> Result<&mut Vm> {
        self.bed
            .vms
            .iter_mut()
            .find(|vm| vm.number == number)
            .with_context(|| format!("there is no vm{number}"))
    }

    /// A TCP port that no case has used in this run.
    pub fn port(&mut self) -> u16 {
        self.port += 1;
        self.port
    }

    /// Puts a figure into the report, under the kernel's name.
    pub fn figure(&mut self, name: &str, value: impl Into<Value>) {
        self.figures
            .push((format!("{}_{name}", self.kernel), value.into()));
    }

    /// Puts a figure of the benchmark into the report.
    pub fn measured(&mut self, figure: Figure) {
        self.measured.figures.push(figure);
    }

    /// Puts a paragraph about those figures into the report.
    pub fn note(&mut self, text: String) {
        self.measured.notes.push(text);
    }

    /// Puts a case that this case consists of into the report.
    pub fn sub_case(&mut self, mut case: CaseReport) {
        case.name = format!("{}: {}", self.kernel, case.name);
        self.sub_cases.push(case);
    }

    /// Puts a case that is a cell of the table into the report, and brings the VMs back if it failed.
    pub fn cell_done(
        &mut self,
        name: String,
        start: Instant,
        outcome: Outcome,
        reason: String,
    ) -> Result<()> {
        self.sub_case(CaseReport {
            name,
            outcome,
            reason,
            seconds: (start.elapsed().as_secs_f64() * 100.0).round() / 100.0,
            tabulated: true,
        });
        if outcome == Outcome::Failed {
            self.mend()?;
        }
        Ok(())
    }

    /// Writes a cell of the report's table.
    pub fn cell(&mut self, row: &str, column: &str, text: &str) {
        self.table.set(row, column, text);
    }

    /// The root image that the VMs boot, or of which their disks are copies.
    pub fn root(&self) -> &Path {
        self.plan.root
    }

    /// Where the logs of this run are.
    pub fn logs(&self) -> &Path {
        &self.plan.logs
    }

    /// What no case may leave behind.
    fn aftermath(&mut self) -> Result<()> {
        for device in self.bed.devices() {
            device.check()?;
        }
        for vm in &mut self.bed.vms {
            vm.check()?;
            let log = vm.sh("dmesg -c")?;
            let mut file = File::options()
                .create(true)
                .append(true)
                .open(self.plan.logs.join(format!("vm{}.dmesg", vm.number)))?;
            file.write_all(log.as_bytes())?;
            let (complaint, known) = complaints(&log);
            if known.contains(&Known::SiwReads) {
                self.remarks.push(format!(
                    "the kernel of vm{} warned that NFS's server had memory regions in use: Soft-iWARP \
                     forgets RDMA READs when it closes a connection",
                    vm.number
                ));
            }
            if let Some(at) = complaint {
                // What was said shortly before may name who is to blame.
                let lines: Vec<_> = log.lines().skip(at.saturating_sub(5)).take(45).collect();
                bail!(
                    "the kernel of vm{} complains:\n{}",
                    vm.number,
                    lines.join("\n")
                );
            }
        }
        Ok(())
    }

    /// Puts the bed into order after a case that failed, which may have left anything behind.
    fn mend(&mut self) -> Result<()> {
        println!("         starting all VMs anew");
        self.restart()
    }

    /// Starts the device and all VMs anew.
    fn restart(&mut self) -> Result<()> {
        self.background = None;
        self.bed.stop();
        self.bed = Bed::start(&self.plan)?;
        Ok(())
    }

    /// What may explain a failure.
    fn circumstances(&mut self) -> String {
        let mut text = String::new();
        if let Some(device) = &self.bed.device {
            match device
                .status()
                .and_then(|status| Ok(serde_json::to_string(&status)?))
            {
                Ok(status) => drop(write!(
                    text,
                    "\ndevice status: {}",
                    status.chars().take(6000).collect::<String>()
                )),
                Err(error) => drop(write!(text, "\ndevice status: {error:#}")),
            }
            let log = shell::tail(device.log(), 1500);
            let _ = write!(text, "\nthe end of the device's log:\n{log}");
        }
        for vm in &mut self.bed.vms {
            match vm.run("dmesg | tail -n 12", Duration::from_secs(10)) {
                Ok(output) => drop(write!(
                    text,
                    "\nthe end of vm{}'s kernel log:\n{}",
                    vm.number, output.text
                )),
                Err(error) => {
                    let _ = write!(text, "\nvm{} does not answer: {error:#}", vm.number);
                    let _ = vm.thaw();
                    if vm.qmp("inject-nmi").is_ok() {
                        std::thread::sleep(Duration::from_secs(3));
                    }
                    let _ = write!(text, "\nthe end of its console:\n{}", vm.console());
                    continue;
                }
            }
            if self.plan.stack.is_some() {
                if let Ok(output) = vm.run("/payload/stuck 3", Duration::from_secs(20)) {
                    let _ = write!(text, "\n{}", output.text);
                }
            }
        }
        text
    }
}

/// What lanes run with.
pub enum Means {
    /// Everything.
    All(Box<Everything>),
    /// The images, for lanes without the device.
    Stock(Images),
}

impl Means {
    /// Builds what the cases of lanes need that are chosen.
    pub fn prepare(lanes: &[Lane], choice: &Choice) -> Result<Self> {
        let mut kernels: Vec<Kernel> = Vec::new();
        for (kernel, _) in lanes.iter().flat_map(|lane| (lane.runs)()) {
            if choice.kernel.is_none_or(|wanted| wanted == kernel) && !kernels.contains(&kernel) {
                kernels.push(kernel);
            }
        }
        let chosen = |lane: &Lane| {
            let runs = (lane.runs)().into_iter();
            runs.flat_map(|(_, cases)| cases)
                .any(|case| iwarp::needs_siw(&case) && choice.wants(0, case.name))
        };
        if lanes.iter().any(|lane| lane.with_device) {
            let mut everything = artifacts::everything(&kernels)?;
            for image in [
                Image::Storage,
                Image::Software,
                Image::Libvirt,
                Image::System,
            ] {
                if lanes.iter().any(|lane| lane.image == image) {
                    everything.images.add(image, &kernels)?;
                }
            }
            if lanes.iter().any(chosen) {
                everything.add_soft_iwarp(&kernels)?;
            }
            everything.hosts = lanes.iter().any(|lane| lane.image == Image::Libvirt);
            if lanes.iter().any(|lane| lane.name == srd::NAME) {
                everything.add_perftest(&kernels)?;
            }
            // A host of VMs has one of each QEMU.
            if everything.hosts || lanes.iter().any(|lane| lane.front_end.wants_stock()) {
                everything.add_stock_qemu()?;
            }
            if lanes.iter().any(|lane| lane.image == Image::System) {
                everything.add_packages()?;
            }
            Ok(Means::All(Box::new(everything)))
        } else {
            Ok(Means::Stock(artifacts::images(&kernels)?))
        }
    }
}

/// What of a lane runs, and how.
#[derive(Clone, Copy, Default)]
pub struct Choice<'a> {
    /// Only this guest kernel.
    pub kernel: Option<Kernel>,
    /// Only cases with this in their names, or one of these, separated by `|`.
    pub only: Option<&'a str>,
    /// Of these, on the lane's kernels behind the first one, only such.
    pub again: Option<&'a str>,
    /// Shorter than usual.
    pub quick: bool,
    /// How a soak runs.
    pub soak: Option<Soak>,
}

impl Choice<'_> {
    /// Whether a case is wanted on kernel number `nth` of a lane.
    fn wants(&self, nth: usize, name: &str) -> bool {
        let has = |parts: &str| parts.split('|').any(|part| name.contains(part));
        self.only.is_none_or(has) && (nth == 0 || self.again.is_none_or(has))
    }
}

/// Runs a lane and writes its report.
pub fn run(lane: &Lane, means: &Means, choice: &Choice) -> Result<Report> {
    let mut lane_report = Report::new(lane.name);
    for (nth, (on, cases)) in (lane.runs)().into_iter().enumerate() {
        let cases: Vec<Case> = cases
            .into_iter()
            .filter(|case| choice.wants(nth, case.name))
            .collect();
        if choice.kernel.is_none_or(|wanted| wanted == on) && !cases.is_empty() {
            run_on(lane, means, on, &cases, choice, &mut lane_report)?;
        }
    }
    let path = lane_report.write()?;
    shell::say(format_args!(
        "{}; report: {}",
        lane_report.summary(),
        path.display()
    ));
    Ok(lane_report)
}

fn run_on(
    lane: &Lane,
    means: &Means,
    kernel: Kernel,
    cases: &[Case],
    choice: &Choice,
    lane_report: &mut Report,
) -> Result<()> {
    let stock = PathBuf::from("qemu-system-x86_64");
    let (images, qemu, stock_qemu, stack) = match means {
        Means::All(everything) => (
            &everything.images,
            &everything.qemu,
            everything.stock_qemu(),
            Some(everything.stack(kernel)?),
        ),
        Means::Stock(images) => (images, &stock, None, None),
    };
    let logs = report::directory()
        .join(format!("{}-logs", lane.name))
        .join(kernel.name());
    let _ = fs::remove_dir_all(&logs);
    let root = images.root(lane.image, kernel)?;
    let on_disk = images::system_kernel(root, kernel);
    let plan = Plan {
        stack: stack.as_ref().filter(|_| lane.with_device),
        qemu,
        stock_qemu,
        root,
        kernel: match lane.image {
            Image::System => &on_disk,
            _ => images.kernel(kernel)?,
        },
        vms: lane.vms,
        memory: lane.memory,
        bare: lane.bare,
        hosts: lane.hosts,
        front_end: lane.front_end,
        disk: (lane.image == Image::Storage).then_some(STORAGE_DISK),
        nested: lane.image == Image::Libvirt,
        logs,
        interactive: false,
    };
    shell::say(format_args!(
        "lane {} on kernel {kernel}: booting {} VMs ...",
        lane.name, lane.vms
    ));
    let start = Instant::now();
    let bed = match Bed::start(&plan) {
        Ok(bed) => bed,
        Err(error) => {
            record(lane_report, kernel, "boot", start, Err(error));
            return Ok(());
        }
    };
    let mut fixture = Fixture {
        bed,
        kernel,
        quick: choice.quick,
        soak: choice.soak,
        background: None,
        plan,
        figures: Vec::new(),
        sub_cases: Vec::new(),
        table: std::mem::take(&mut lane_report.table),
        measured: Measurements::default(),
        remarks: Vec::new(),
        port: 18600,
    };
    fixture.figure(
        "boot_seconds",
        (start.elapsed().as_secs_f64() * 10.0).round() / 10.0,
    );
    let result = fixture.aftermath().map(|()| String::new());
    record(lane_report, kernel, "boot", start, result);
    for case in cases {
        let start = Instant::now();
        let result = (case.run)(&mut fixture).and_then(|()| fixture.aftermath());
        let failed = result
            .as_ref()
            .is_err_and(|error| error.downcast_ref::<Skip>().is_none());
        let result = result.map_err(|error| {
            if failed {
                error.context(fixture.circumstances())
            } else {
                error
            }
        });
        let remarks = std::mem::take(&mut fixture.remarks);
        let damaged = failed || !remarks.is_empty();
        let result = result.map(|()| remarks.join("\n"));
        record(lane_report, kernel, case.name, start, result);
        for case in std::mem::take(&mut fixture.sub_cases) {
            tell(&case);
            lane_report.cases.push(case);
        }
        if damaged {
            if let Err(error) = fixture.mend() {
                record(
                    lane_report,
                    kernel,
                    "starting the VMs anew",
                    start,
                    Err(error),
                );
                break;
            }
        }
    }
    lane_report
        .figures
        .extend(std::mem::take(&mut fixture.figures));
    lane_report.table = std::mem::take(&mut fixture.table);
    lane_report
        .measured
        .notes
        .append(&mut fixture.measured.notes);
    lane_report
        .measured
        .figures
        .append(&mut fixture.measured.figures);
    Ok(())
}

/// Adds a case to the report and prints it. What there is to say of one that passed is its result.
fn record(
    lane_report: &mut Report,
    kernel: Kernel,
    name: &str,
    start: Instant,
    result: Result<String>,
) {
    let (outcome, reason) = match result {
        Ok(remarks) => (Outcome::Passed, remarks),
        Err(error) => match error.downcast_ref::<Skip>() {
            Some(skip) => (Outcome::Skipped, skip.0.clone()),
            // The circumstances are the outermost context: the cause goes first.
            None => (Outcome::Failed, reason(&error)),
        },
    };
    let case = CaseReport {
        name: format!("{kernel}: {name}"),
        outcome,
        reason,
        seconds: (start.elapsed().as_secs_f64() * 100.0).round() / 100.0,
        tabulated: false,
    };
    tell(&case);
    lane_report.cases.push(case);
}

/// Prints a case, unless the table has it.
fn tell(case: &CaseReport) {
    let failed = case.outcome == Outcome::Failed;
    if case.tabulated && !failed {
        return;
    }
    println!(
        "  {:7} {:6.1} s  {}",
        report::word(case.outcome),
        case.seconds,
        case.name
    );
    let shown: Vec<&str> = case
        .reason
        .lines()
        .take(if failed { 30 } else { 1 })
        .collect();
    if !shown.is_empty() {
        println!("          {}", shown.join("\n          "));
    }
}

/// The chain of causes with what explains them at the end.
fn reason(error: &anyhow::Error) -> String {
    let mut parts: Vec<String> = error.chain().map(ToString::to_string).collect();
    let circumstances = if parts.first().is_some_and(|part| part.starts_with('\n')) {
        parts.remove(0)
    } else {
        String::new()
    };
    parts.join(": ") + &circumstances
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_warnings_are_told_from_what_is_none() {
        let waited =
            |states| format!("cm_destroy_id_wait_timeout: cm_id=0 timed out. {states}, refcnt=1");
        assert!(is_complaint(&waited("state 10 -> 0")));
        assert!(!is_complaint(&waited("state 1 -> 0")));
        assert!(is_complaint("WARNING: CPU: 0 PID: 1 at"));
        assert!(!is_complaint("virtio_rdma virtio7: RDMA device ready"));
        let trace = "WARNING: CPU: 0 PID: 377 at drivers/infiniband/sw/rxe/rxe_comp.c:827\n\
            Call Trace:\n---[ end trace 0000000000000000 ]---";
        assert_eq!(first_complaint(trace), None);
        let then = format!("{trace}\nBUG: kernel NULL pointer dereference\nCall Trace:");
        assert_eq!(first_complaint(&then), Some(3));
        assert_eq!(
            first_complaint("WARNING: at drivers/infiniband/core\n"),
            Some(0)
        );
    }

    /// Soft-iWARP's own is passed over where Soft-iWARP is, and only where our driver is not.
    #[test]
    fn that_siw_forgets_reads_is_known() {
        let trace = |place: &str, modules: &str, caller: &str| {
            format!(
                "[  129.274445] siw: got TERMINATE. layer 0, type 2, code 2\n\
                 [  129.280147] ------------[ cut here ]------------\n\
                 [  129.280234] WARNING: CPU: 0 PID: 410 at {place} [ib_core]\n\
                 [  129.280554] Modules linked in: {modules} [last unloaded: virtio_rdma(OE)]\n\
                 [  129.281200] Workqueue: nfsd4_callbacks nfsd4_run_cb_work [nfsd]\n\
                 [  129.281909] Call Trace:\n\
                 [  129.282445]  {caller}+0x88/0x130 [rpcrdma]\n\
                 [  129.282999] ---[ end trace 0000000000000000 ]---\n"
            )
        };
        let qp = "drivers/infiniband/core/verbs.c:2104 ib_destroy_qp_user+0x165/0x1a0";
        let known = trace(qp, "siw(OE) rpcrdma ib_core", "svc_rdma_free");
        assert_eq!(complaints(&known), (None, vec![Known::SiwReads]));
        let crc = trace(qp, "siw_crc(OE) rpcrdma ib_core", "svc_rdma_free");
        assert_eq!(first_complaint(&crc), None);
        // What comes after it is a complaint.
        let then = format!("{known}WARNING: CPU: 0 PID: 1 at fs/nfsd/nfs4state.c:1\n");
        assert_eq!(first_complaint(&then), Some(8));
        let other = "drivers/infiniband/core/verbs.c:333 ib_dealloc_pd_user+0x1/0x2";
        for trace in [
            trace(qp, "virtio_rdma(OE) rpcrdma ib_core", "svc_rdma_free"),
            trace(qp, "siw(OE) virtio_rdma(OE) rpcrdma", "svc_rdma_free"),
            trace(qp, "rpcrdma ib_core", "svc_rdma_free"),
            trace(qp, "siw(OE) rpcrdma ib_core", "rpcrdma_ep_destroy"),
            trace(other, "siw(OE) rpcrdma ib_core", "svc_rdma_free"),
        ] {
            assert_eq!(complaints(&trace), (Some(2), vec![]), "{trace}");
        }
    }
}
