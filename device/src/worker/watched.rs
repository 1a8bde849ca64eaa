// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which doorbells of a VM a poll iteration looks at.
//!
//! All of them, if the VM has few contexts. One with many would have everybody wait while they are
//! looked at: of these the ones that rang lately are looked at each time, and the others in turn,
//! a few each time.
use crate::engine::tables::{Context, Tables};

/// A VM with places for so many contexts at most has all of them looked at each time.
pub(super) const FEW: usize = 64;
/// Of a VM with more: those that rang lately,
const RECENT: usize = 16;
/// and those at so many places, in turn.
const IN_TURN: usize = 16;

/// The doorbells of a VM, as one worker looks at them.
#[derive(Debug, Default)]
pub(super) struct Watched {
    /// Handles of contexts that rang lately.
    recent: arrayvec::ArrayVec<u32, RECENT>,
    /// The place in `recent` of the next one that rings.
    hand: usize,
    /// The place of the next context to look at.
    next: usize,
}

impl Watched {
    /// Calls `f`, which returns whether the doorbell rings, with the contexts to look at of a VM
    /// that has more than [`FEW`].
    #[inline(never)]
    pub(super) fn look<'a>(&mut self, tables: &'a Tables, mut f: impl FnMut(&'a Context) -> bool) {
        for handle in &self.recent {
            if let Some(context) = tables.contexts.get(*handle) {
                f(context);
            }
        }
        let contexts = tables.contexts.iter_from(self.next, IN_TURN);
        self.next = (self.next + IN_TURN) % tables.contexts.places().max(1);
        for (handle, context) in contexts {
            if !self.recent.contains(&handle) && f(context) {
                self.keep(handle);
            }
        }
    }

    /// A context rang that had not lately.
    fn keep(&mut self, handle: u32) {
        if self.recent.try_push(handle).is_ok() {
            return;
        }
        if let Some(oldest) = self.recent.get_mut(self.hand) {
            *oldest = handle;
        }
        self.hand = (self.hand + 1) % RECENT;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::fixture::Guest;
    use crate::footprint::Share;
    use crate::memory::{region, GuestMemory, Pages};
    use vhost_device_rdma_sync::Readers;

    /// Tables with so many contexts, of which each is known by its footprint.
    fn with_contexts(count: usize, f: impl FnOnce(&mut Tables)) {
        let (readers, _each) = Readers::new(1);
        let guest = Guest::new(&readers, 1);
        let memory = GuestMemory::new(vec![region(0, 1)]).unwrap();
        let mut tables = guest.vm.tables_mut();
        tables.contexts.clear();
        for number in 0..count {
            let doorbell = Pages::resolve(&memory, &[0], 12).unwrap();
            let context = Context {
                doorbell,
                workers: Vec::new(),
                users: number as u32,
                share: Share::default(),
            };
            tables.contexts.insert_with(|_| Ok(context)).unwrap();
        }
        f(&mut tables);
    }

    /// Those that are looked at, of which `rings` says whether they ring.
    fn look(watched: &mut Watched, tables: &Tables, rings: impl Fn(u32) -> bool) -> Vec<u32> {
        let mut seen = Vec::new();
        watched.look(tables, |context| {
            seen.push(context.users);
            rings(context.users)
        });
        seen
    }

    #[test]
    fn of_many_a_few_are_looked_at_each_time_and_all_in_turn() {
        with_contexts(4096, |tables| {
            let mut watched = Watched::default();
            let mut all = vec![false; 4096];
            for _ in 0..4096 / IN_TURN {
                let seen = look(&mut watched, tables, |_| false);
                assert!(seen.len() <= RECENT + IN_TURN);
                seen.iter().for_each(|number| all[*number as usize] = true);
            }
            assert!(all.iter().all(|seen| *seen));
        });
    }

    #[test]
    fn those_that_rang_lately_are_looked_at_each_time() {
        with_contexts(4096, |tables| {
            let mut watched = Watched::default();
            let busy = |number| (1000..1000 + RECENT as u32).contains(&number);
            for _ in 0..4096 / IN_TURN {
                look(&mut watched, tables, busy);
            }
            for _ in 0..1000 {
                let mut seen = look(&mut watched, tables, busy);
                seen.sort_unstable();
                assert_eq!(seen.iter().filter(|number| busy(**number)).count(), RECENT);
                seen.dedup();
                assert!(seen.len() > RECENT && seen.len() <= RECENT + IN_TURN);
            }
        });
    }
}
