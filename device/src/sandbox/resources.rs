// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Limits of what the process may use of the system.
use rustix::io::Errno;
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};

/// What the process has no use for.
const UNUSED: [Resource; 4] = [
    // Locked memory.
    Resource::Memlock,
    // Message queues.
    Resource::Msgqueue,
    // Priorities that others do not have.
    Resource::Nice,
    Resource::Rtprio,
];

/// Allows `descriptors` file descriptors and `more`, or as many as there may be, and nothing of what
/// is not used.
pub(super) fn limit(descriptors: u64, more: u64) -> Result<(), Errno> {
    let most = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    set(Resource::Nofile, descriptors.saturating_add(more).min(most))?;
    if descriptors > most {
        log::warn!(
            "only {most} file descriptors are allowed (RLIMIT_NOFILE): {descriptors} are enough"
        );
    }
    UNUSED.into_iter().try_for_each(|resource| set(resource, 0))
}

fn set(resource: Resource, limit: u64) -> Result<(), Errno> {
    let limit = Rlimit {
        current: Some(limit),
        maximum: Some(limit),
    };
    setrlimit(resource, limit)
}
