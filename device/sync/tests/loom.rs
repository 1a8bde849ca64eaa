// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Model check of the lock of the tables: every interleaving, every value a load may return.
//!
//!     RUSTFLAGS="--cfg loom" cargo test -p vhost-device-rdma-sync --release --test loom
//!
//! The model checker tells of each access to the value that is not ordered after all changes before
//! it.
#![cfg(loom)]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use vhost_device_rdma_sync::{Readers, Shared};

/// Two numbers that are the same whenever nobody changes them.
struct Pair(UnsafeCell<(u64, u64)>);

// SAFETY: the model checker watches each access.
unsafe impl Sync for Pair {}

impl Pair {
    fn shared(readers: Readers) -> Arc<Shared<Self>> {
        Arc::new(Shared::new(readers, Self(UnsafeCell::new((0, 0)))))
    }

    fn check(&self) -> u64 {
        self.0.with(|pair| {
            // SAFETY: as above.
            let (a, b) = unsafe { *pair };
            assert_eq!(a, b);
            a
        })
    }

    fn change(&self) {
        self.0.with_mut(|pair| {
            // SAFETY: as above.
            let pair = unsafe { &mut *pair };
            pair.0 += 1;
            pair.1 += 1;
        });
    }
}

#[test]
fn a_reader_never_sees_a_change_under_way() {
    loom::model(|| {
        let (readers, mut each) = Readers::new(1);
        let shared = Pair::shared(readers);
        let mut reader = each.pop().unwrap();
        let theirs = shared.clone();
        let worker = thread::spawn(move || {
            let mut seen = 0;
            for _ in 0..2 {
                let mut section = reader.enter();
                // Twice in a section, with others let in between.
                for _ in 0..2 {
                    if let Some(pair) = theirs.read_in(&section) {
                        let now = pair.check();
                        assert!(now >= seen);
                        seen = now;
                    }
                    section.yield_to_writers();
                }
            }
        });
        shared.write().change();
        worker.join().unwrap();
        assert_eq!(shared.read().check(), 1);
    });
}

#[test]
fn a_read_section_keeps_several_values() {
    loom::model(|| {
        let (readers, mut each) = Readers::new(1);
        let [a, b] = [(); 2].map(|()| Pair::shared(readers.clone()));
        let mut reader = each.pop().unwrap();
        let theirs = [a.clone(), b.clone()];
        let worker = thread::spawn(move || {
            let section = reader.enter();
            let [a, b] = theirs.each_ref().map(|shared| shared.read_in(&section));
            for pair in [a, b, a].into_iter().flatten() {
                pair.check();
            }
        });
        a.write().change();
        b.write().change();
        worker.join().unwrap();
    });
}

#[test]
fn each_reader_is_waited_for() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let (readers, each) = Readers::new(2);
        let shared = Pair::shared(readers);
        let workers: Vec<_> = each
            .into_iter()
            .map(|mut reader| {
                let shared = shared.clone();
                thread::spawn(move || {
                    let section = reader.enter();
                    shared.read_in(&section).map(Pair::check)
                })
            })
            .collect();
        shared.write().change();
        for worker in workers {
            worker.join().unwrap();
        }
    });
}
