// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The system calls that each kind of thread may make, by seccomp.
//!
//! A call that is not listed ends the process, and the kernel's log says which it was. To find out
//! what a list lacks, `--sandbox log` has such calls logged and carried out.
use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::{
    apply_filter, BpfProgram, Error, SeccompAction, SeccompCmpArgLen, SeccompCmpOp,
    SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

use super::{Kind, Mode};

/// With which arguments a call is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum With {
    /// All.
    Any,
    /// This one, a word of 32 bits, has one of these values.
    OneOf(u8, &'static [u32]),
    /// This one has none of these bits.
    Without(u8, u32),
    /// This one has all of these bits.
    All(u8, u32),
    /// The first one is this process.
    OwnProcess,
}

use With::{All, Any, OneOf, OwnProcess, Without};

type Call = (c_long, With);

const EXECUTABLE: u32 = libc::PROT_EXEC as u32;
const THREAD: u32 = libc::CLONE_THREAD as u32;
const NO_BLOCKING: u32 = libc::FIONBIO as u32;
const FLAGS_OF_INTERFACE: u32 = libc::SIOCGIFFLAGS as u32;
const MTU_OF_INTERFACE: u32 = libc::SIOCGIFMTU as u32;
const NAMES: &[u32] = &[libc::PR_SET_NAME as u32, libc::PR_SET_VMA as u32];

const NAMES_AND_PRIVILEGES: &[u32] = &[
    libc::PR_SET_NAME as u32,
    libc::PR_SET_VMA as u32,
    libc::PR_SET_NO_NEW_PRIVS as u32,
];

/// Memory, as the allocator and guests need it. None of it is to be executed.
const MEMORY: &[Call] = &[
    (libc::SYS_brk, Any),
    (libc::SYS_madvise, Any),
    (libc::SYS_mmap, Without(2, EXECUTABLE)),
    (libc::SYS_mprotect, Without(2, EXECUTABLE)),
    (libc::SYS_mremap, Any),
    (libc::SYS_munmap, Any),
];

/// A thread by itself: locks, time, the end of a handler of a signal, its own end, that of all.
const THREADS: &[Call] = &[
    (libc::SYS_clock_gettime, Any),
    (libc::SYS_exit, Any),
    (libc::SYS_exit_group, Any),
    (libc::SYS_futex, Any),
    (libc::SYS_getpid, Any),
    // Keys of hash tables.
    (libc::SYS_getrandom, Any),
    (libc::SYS_gettid, Any),
    (libc::SYS_restart_syscall, Any),
    // Guest memory that is lost, and the end of the process by what is not.
    (libc::SYS_rt_sigaction, OneOf(0, &[libc::SIGBUS as u32])),
    (libc::SYS_rt_sigprocmask, Any),
    (libc::SYS_rt_sigreturn, Any),
    (libc::SYS_sched_yield, Any),
    (libc::SYS_sigaltstack, Any),
    // What abort() does.
    (libc::SYS_tgkill, OwnProcess),
];

/// Waiting for descriptors, wake-ups of others, interrupts, the log. Interrupts go by way of
/// asynchronous I/O, which does not block.
const EVENTS: &[Call] = &[
    (libc::SYS_close, Any),
    (libc::SYS_epoll_pwait, Any),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_epoll_wait, Any),
    (libc::SYS_io_destroy, Any),
    (libc::SYS_io_getevents, Any),
    (libc::SYS_io_setup, Any),
    (libc::SYS_io_submit, Any),
    (libc::SYS_read, Any),
    (libc::SYS_write, Any),
];

/// What a worker does besides: it sets its timer, and sends and receives frames. (The standard
/// library asks for flags before it closes a descriptor, if it is built for debugging.)
const WORKER: &[Call] = &[
    (libc::SYS_fcntl, OneOf(1, &[libc::F_GETFD as u32])),
    (libc::SYS_recvmsg, Any),
    (libc::SYS_sendto, Any),
    // How long each datagram of a burst is.
    (libc::SYS_setsockopt, OneOf(2, &[libc::UDP_SEGMENT as u32])),
    (libc::SYS_timerfd_settime, Any),
];

/// What a worker does besides that has connections of TCP: it takes them over, moves their bytes, and
/// ends them.
const WORKER_OF_CONNECTIONS: &[Call] = &[
    (libc::SYS_accept4, Any),
    (libc::SYS_epoll_ctl, Any),
    (libc::SYS_getpeername, Any),
    (libc::SYS_getsockname, Any),
    (libc::SYS_getsockopt, Any),
    (libc::SYS_recvfrom, Any),
    (
        libc::SYS_setsockopt,
        OneOf(
            2,
            &[
                libc::TCP_NODELAY as u32,
                libc::SO_KEEPALIVE as u32,
                libc::UDP_SEGMENT as u32,
            ],
        ),
    ),
    (libc::SYS_shutdown, Any),
];

/// What front ends' threads do besides whose VMs have connections of TCP: they begin them.
const FRONT_END_OF_CONNECTIONS: &[Call] = &[
    (libc::SYS_bind, Any),
    (libc::SYS_connect, Any),
    (libc::SYS_getsockname, Any),
    (libc::SYS_listen, Any),
    (
        libc::SYS_socket,
        OneOf(0, &[libc::AF_INET as u32, libc::AF_INET6 as u32]),
    ),
];

/// Starting threads, but no processes. (What [`UNKNOWN`] has is tried before.)
const START: &[Call] = &[
    (libc::SYS_clone, All(0, THREAD)),
    (libc::SYS_rseq, Any),
    (libc::SYS_sched_getaffinity, Any),
    (libc::SYS_set_robust_list, Any),
];

/// Connections that come in, their file descriptors and what is known of these, and time to wait.
const CONNECTIONS: &[Call] = &[
    (libc::SYS_accept4, Any),
    (libc::SYS_clock_nanosleep, Any),
    (libc::SYS_epoll_create1, Any),
    (libc::SYS_epoll_ctl, Any),
    (libc::SYS_eventfd2, Any),
    (libc::SYS_fcntl, Any),
    (libc::SYS_fstat, Any),
    (libc::SYS_fstatfs, Any),
    (libc::SYS_getsockopt, Any),
    (libc::SYS_lseek, Any),
    // fstat(), as the C library does it.
    (libc::SYS_newfstatat, Any),
    (libc::SYS_pread64, Any),
    (libc::SYS_readv, Any),
    (libc::SYS_recvfrom, Any),
    (libc::SYS_recvmsg, Any),
    (libc::SYS_sendmsg, Any),
    (libc::SYS_sendto, Any),
    (libc::SYS_setsockopt, Any),
    (libc::SYS_shutdown, Any),
    (libc::SYS_statx, Any),
    (libc::SYS_writev, Any),
];

/// What front ends' threads do besides.
const FRONT_END: &[Call] = &[
    (libc::SYS_ioctl, OneOf(1, &[NO_BLOCKING])),
    (libc::SYS_prctl, OneOf(0, NAMES)),
];

/// What the main thread does besides: it waits for signals, and removes sockets. Another one asks for
/// the state of interfaces.
const MAIN: &[Call] = &[
    (
        libc::SYS_ioctl,
        OneOf(1, &[NO_BLOCKING, FLAGS_OF_INTERFACE, MTU_OF_INTERFACE]),
    ),
    // Of a socket that is passed.
    (libc::SYS_getsockname, Any),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_unlink, Any),
    (libc::SYS_unlinkat, Any),
];

/// Confining threads that are started for devices which come later: it can only take more away.
const CONFINE: &[Call] = &[
    (libc::SYS_landlock_restrict_self, Any),
    (libc::SYS_prctl, OneOf(0, NAMES_AND_PRIVILEGES)),
    (
        libc::SYS_seccomp,
        OneOf(0, &[libc::SECCOMP_SET_MODE_FILTER]),
    ),
];

/// Calls that are answered as by a kernel that does not have them: the C library then makes others,
/// whose arguments can be judged.
const UNKNOWN: &[c_long] = &[libc::SYS_clone3];

/// What a kind of thread may do; a later call that is there twice counts. `connections`: the process
/// has some of TCP.
fn allowed_with(kind: Kind, connections: bool) -> impl Iterator<Item = Call> {
    let more = match kind {
        Kind::Worker if connections => WORKER_OF_CONNECTIONS,
        Kind::FrontEnd | Kind::Control if connections => FRONT_END_OF_CONNECTIONS,
        _ => &[],
    };
    allowed(kind).chain(more.iter().copied())
}

/// What a kind of thread may do in any process.
fn allowed(kind: Kind) -> impl Iterator<Item = Call> {
    let lists: &[&[Call]] = match kind {
        Kind::Worker => &[MEMORY, THREADS, EVENTS, WORKER],
        Kind::FrontEnd => &[MEMORY, THREADS, EVENTS, START, CONNECTIONS, FRONT_END],
        Kind::Control => &[MEMORY, THREADS, EVENTS, START, CONNECTIONS, MAIN, CONFINE],
    };
    lists.iter().copied().flatten().copied()
}

impl With {
    fn rules(self) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
        let conditions = match self {
            Any => vec![],
            OneOf(argument, values) => values
                .iter()
                .map(|value| (argument, SeccompCmpOp::Eq, *value))
                .collect(),
            Without(argument, bits) => vec![(argument, masked(bits), 0)],
            All(argument, bits) => vec![(argument, masked(bits), bits)],
            OwnProcess => vec![(0, SeccompCmpOp::Eq, std::process::id())],
        };
        let rule = |(argument, operator, value)| {
            let length = SeccompCmpArgLen::Dword;
            let condition = SeccompCondition::new(argument, length, operator, u64::from(value))?;
            SeccompRule::new(vec![condition])
        };
        conditions.into_iter().map(rule).collect()
    }
}

fn masked(bits: u32) -> SeccompCmpOp {
    SeccompCmpOp::MaskedEq(u64::from(bits))
}

/// Two programs for each kind of thread: the kernel takes the stricter answer of both.
#[derive(Debug)]
pub(super) struct Filters {
    unknown: BpfProgram,
    allowed: Vec<(Kind, BpfProgram)>,
}

impl Filters {
    /// What is not listed ends the process, or is logged.
    pub(super) fn new(mode: Mode, connections: bool) -> Result<Self, Error> {
        let otherwise = match mode {
            Mode::On => SeccompAction::KillProcess,
            Mode::Log | Mode::Off => SeccompAction::Log,
        };
        let unknown = UNKNOWN.iter().map(|call| (*call, Vec::new())).collect();
        let no_such_call = SeccompAction::Errno(libc::ENOSYS as u32);
        let mut filters = Self {
            unknown: program(unknown, no_such_call, SeccompAction::Allow)?,
            allowed: Vec::new(),
        };
        for kind in Kind::ALL {
            let mut calls: BTreeMap<_, _> = allowed_with(kind, connections)
                .map(|(call, with)| Ok((call, with.rules()?)))
                .collect::<Result<_, Error>>()?;
            // They get past this one, to have the other's answer.
            calls.extend(UNKNOWN.iter().map(|call| (*call, Vec::new())));
            let allow = SeccompAction::Allow;
            let program = program(calls, allow, otherwise.clone())?;
            filters.allowed.push((kind, program));
        }
        Ok(filters)
    }

    /// Restricts the calling thread.
    pub(super) fn install(&self, kind: Kind) -> Result<(), Error> {
        apply_filter(&self.unknown)?;
        let mut of_kind = self.allowed.iter().filter(|(other, _)| *other == kind);
        of_kind.try_for_each(|(_, program)| apply_filter(program))
    }
}

fn program(
    calls: BTreeMap<c_long, Vec<SeccompRule>>,
    listed: SeccompAction,
    otherwise: SeccompAction,
) -> Result<BpfProgram, Error> {
    let target = TargetArch::try_from(std::env::consts::ARCH)?;
    let filter = SeccompFilter::new(calls, otherwise, listed, target)?;
    Ok(filter.try_into()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, ExitStatus};

    /// Names what a child process of these tests is to do.
    const ACT: &str = "SANDBOX_TEST_ACT";

    fn names(kind: Kind) -> HashSet<c_long> {
        allowed(kind).map(|(call, _)| call).collect()
    }

    #[test]
    fn a_worker_may_make_forty_system_calls_at_most() {
        let calls = names(Kind::Worker);
        assert_eq!(
            calls.len(),
            allowed(Kind::Worker).count(),
            "one is listed twice"
        );
        assert!(calls.len() <= 40, "{}", calls.len());
    }

    #[test]
    fn no_thread_may_open_files_execute_programs_or_attach_to_processes() {
        for kind in Kind::ALL {
            let calls = names(kind);
            assert_eq!(calls.len(), allowed(kind).count(), "one is listed twice");
            for call in [
                libc::SYS_openat,
                libc::SYS_execve,
                libc::SYS_execveat,
                libc::SYS_ptrace,
                libc::SYS_process_vm_writev,
                libc::SYS_socket,
                libc::SYS_connect,
                libc::SYS_bind,
                libc::SYS_bpf,
                libc::SYS_io_uring_setup,
                libc::SYS_userfaultfd,
                libc::SYS_kill,
                libc::SYS_setresuid,
                libc::SYS_mount,
                libc::SYS_unshare,
            ] {
                assert!(!calls.contains(&call), "{kind:?}: {call}");
            }
        }
    }

    /// What this process ends with when it is confined as a worker and does `act`.
    fn end_of(act: &str) -> ExitStatus {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "sandbox::system_calls::tests::child"]);
        command.env(ACT, act).output().unwrap().status
    }

    /// Does nothing but in a child process of [`end_of`].
    #[test]
    fn child() {
        let Ok(act) = std::env::var(ACT) else {
            return;
        };
        let mode = match act.as_str() {
            "log a file" => Mode::Log,
            _ => Mode::On,
        };
        let kind = match act.as_str() {
            "start a thread" => Kind::FrontEnd,
            _ => Kind::Worker,
        };
        let filters = Filters::new(mode, false).unwrap();
        let confined = move || {
            filters.install(kind).unwrap();
            match act.as_str() {
                "allocate" => drop(std::hint::black_box(vec![0; 1 << 24])),
                "open a file" | "log a file" => drop(std::fs::File::open("/dev/null")),
                "start a thread" => std::thread::spawn(|| ()).join().unwrap(),
                "thread of a worker" => drop(std::thread::spawn(|| ())),
                "start a program" => drop(Command::new("/bin/true").spawn()),
                "abort" => std::process::abort(),
                _ => panic!("{act}?"),
            }
            std::process::exit(7);
        };
        std::thread::spawn(confined).join().unwrap();
    }

    #[test]
    fn a_call_that_is_not_listed_ends_the_process() {
        for act in ["open a file", "start a program", "thread of a worker"] {
            assert_eq!(end_of(act).signal(), Some(libc::SIGSYS), "{act}");
        }
    }

    #[test]
    fn calls_that_are_listed_or_only_logged_are_carried_out() {
        for act in ["allocate", "start a thread", "log a file"] {
            assert_eq!(end_of(act).code(), Some(7), "{act}");
        }
        assert_eq!(end_of("abort").signal(), Some(libc::SIGABRT));
    }
}
