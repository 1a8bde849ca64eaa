// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! libFuzzer with one of the targets: the one that the environment variable `FUZZ_TARGET` names.
//! `cargo xtask fuzz` builds and runs it.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use virtio_rdma_fuzz::{find, Target};

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    find(&name).expect("FUZZ_TARGET names a target")
});

fuzz_target!(|data: &[u8]| {
    (TARGET.run)(data);
});
