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
use vhost_device_rdma_sync::{Shared, Visitors};

/// Two numbers that are the same whenever nobody changes them.
struct Pair(UnsafeCell<(u64, u64)>);

// SAFETY: the model checker watches each access.
unsafe impl Sync for Pair {}

impl Pair {
    fn shared(visitors: Visitors) -> Arc<Shared<Self>> {
        Arc::new(Shared::new(visitors, Self(UnsafeCell::new((0, 0)))))
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
fn a_visitor_never_sees_a_change_under_way() {
    loom::model(|| {
        let (visitors, mut each) = Visitors::new(1);
        let shared = Pair::shared(visitors);
        let mut visitor = each.pop().unwrap();
        let theirs = shared.clone();
        let worker = thread::spawn(move || {
            let mut seen = 0;
            for _ in 0..2 {
                let mut visit = visitor.enter();
                // Twice in a visit, with others let in between.
                for _ in 0..2 {
                    if let Some(pair) = theirs.visit(&visit) {
                        let now = pair.check();
                        assert!(now >= seen);
                        seen = now;
                    }
                    visit.pause();
                }
            }
        });
        shared.write().change();
        worker.join().unwrap();
        assert_eq!(shared.read().check(), 1);
    });
}

#[test]
fn a_visit_of_several_values_keeps_them_all() {
    loom::model(|| {
        let (visitors, mut each) = Visitors::new(1);
        let [a, b] = [(); 2].map(|()| Pair::shared(visitors.clone()));
        let mut visitor = each.pop().unwrap();
        let theirs = [a.clone(), b.clone()];
        let worker = thread::spawn(move || {
            let visit = visitor.enter();
            let [a, b] = theirs.each_ref().map(|shared| shared.visit(&visit));
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
fn each_visitor_is_waited_for() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let (visitors, each) = Visitors::new(2);
        let shared = Pair::shared(visitors);
        let workers: Vec<_> = each
            .into_iter()
            .map(|mut visitor| {
                let shared = shared.clone();
                thread::spawn(move || {
                    let visit = visitor.enter();
                    shared.visit(&visit).map(Pair::check)
                })
            })
            .collect();
        shared.write().change();
        for worker in workers {
            worker.join().unwrap();
        }
    });
}
