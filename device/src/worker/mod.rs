// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Workers: the threads that poll doorbells and queue pairs, shared by all VMs.
//!
//! A worker loops (`event_loop`): it takes what other threads scheduled (`handle`), scans the
//! doorbell memory of every VM (`doorbell`, `watched`), looks at the timers (`timers`), and polls
//! each queue pair with work within a budget (`scheduler`): at once where its doorbell rang, if the
//! run queue is empty, otherwise in the order of the run queue, which is fair by VM (`run_queue`).
//! Without work it polls on for a while, then sleeps until a doorbell queue is notified, another
//! thread schedules something, or a timer ends. Where guests compete for its CPU and would notify
//! it all the time, it backs off instead (`idle_policy`).
//!
//! A sender of one message at a time is answered soonest: while nobody else has work, the worker
//! goes on polling the send queue of the last queue pair, and that of its peer, beside the
//! doorbells (`busy_poll`).
//!
//! # What a VM can cost another
//! Whatever a VM has of contexts, queue pairs and timers, a poll iteration does a bounded part of it
//! for each VM: it looks at some 64 doorbells, wakes one parked queue pair, and polls 4 queue pairs
//! that rang if another VM's rang, too. What remains is in the run queue, where the VM that has had
//! least of the worker's time is next.
//!
//! # Sleeping loses no wake-up
//! A guest sets its doorbell bit and then loads the worker's status word; the worker stores
//! SLEEPING and then scans all doorbells once more before it sleeps. Both are a store, a full
//! fence, and a load: so either the guest sees SLEEPING and notifies, or the worker sees the bit.
//! The same holds between scheduling (inbox, then `asleep`) and the worker (`asleep`, then inbox).
//! The notification itself is an eventfd, which remembers, or a message (`messages`).
//!
//! # A worker that fails is seen
//! One that panics (`supervision`) or makes no progress (`watchdog`) would leave its queue pairs
//! waiting in a process that looks healthy. So it ends the process: front ends see that their
//! connections end, guests see a lost device, and what started the process starts it again.
mod busy_poll;
mod doorbell;
mod event_loop;
mod handle;
mod idle_policy;
mod iwarp;
mod messages;
mod pace;
mod run_queue;
mod scheduler;
mod supervision;
mod timers;
mod watchdog;
mod watched;
mod wire;

pub use event_loop::Loop;
pub(crate) use handle::TURNS;
pub use handle::{Shared, ThreadOptions, Worker};
pub(crate) use messages::{Messages, EXCLUSIVE};
pub use supervision::{end_process, Failure, OnFailure, FAILURE_STATUS};
pub use watchdog::{Watchdog, WatchdogLimits};
