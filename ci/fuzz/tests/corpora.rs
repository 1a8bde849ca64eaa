// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The committed inputs of all targets: none of them may do harm (any longer).
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use virtio_rdma_fuzz::TARGETS;

fn corpora() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

/// A thread of the device that panics ends with its session, and nobody else would notice.
static PANICKED: AtomicBool = AtomicBool::new(false);

#[test]
fn committed_inputs_do_no_harm() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        PANICKED.store(true, Ordering::SeqCst);
        usual(panic);
    }));
    for target in TARGETS {
        let folder = corpora().join(target.name);
        let mut inputs: Vec<_> = folder
            .read_dir()
            .expect("a corpus")
            .map(|entry| entry.expect("an input").path())
            .collect();
        inputs.sort();
        assert!(!inputs.is_empty(), "{} has no corpus", target.name);
        for input in inputs {
            // The harness shows this if the target panics.
            println!("{}", input.display());
            (target.run)(&std::fs::read(&input).expect("an input"));
            assert!(!PANICKED.load(Ordering::SeqCst), "a thread panicked");
        }
    }
}

#[test]
fn a_corpus_belongs_to_a_target() {
    for entry in corpora().read_dir().expect("corpora") {
        let name = entry.expect("a corpus").file_name();
        let known = TARGETS.iter().any(|target| *target.name == *name);
        assert!(known, "there is no target {name:?}");
    }
}
