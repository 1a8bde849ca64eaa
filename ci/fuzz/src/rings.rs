// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target `rings`: while two guests have traffic and register memory, another thread scribbles over
//! their rings, doorbells, page tables and records. The neighbour's traffic arrives meanwhile.
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use arbitrary::{Result, Unstructured};
use vhost_device_rdma_bare::mapping::View;

use crate::host::{Guest, Host, PAGE};
use crate::neighbour::Neighbour;
use crate::scene::Scene;

/// Steps of an input.
const MOST_STEPS: usize = 100;
/// Words that are scribbled again and again.
const WORDS: usize = 64;
/// Pages in which there is something.
const USED: usize = 40;

/// A word of a side's memory, and what is written there in turn.
#[derive(Debug, Clone, Copy)]
struct Word {
    side: usize,
    at: usize,
    values: [u64; 2],
}

/// Ends the other thread, even if this one panics: nobody else would.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs an input.
pub fn run(data: &[u8]) {
    let mut host = Host::new();
    let mut neighbour = Neighbour::new(&host);
    let privileged = data.last().is_some_and(|byte| byte & 1 != 0);
    let mut scene = Scene::new(&host, privileged, false);
    let mut u = Unstructured::new(data);
    let mut words = Vec::new();
    for _ in 0..WORDS {
        words.extend(word(&mut u));
    }
    let views = [0, 1].map(|side: usize| scene.sides[side].guest.view.clone());
    let stop = AtomicBool::new(false);
    thread::scope(|threads| {
        threads.spawn(|| scribble(&views, &words, &stop));
        let _stops = Stops(&stop);
        for _ in 0..MOST_STEPS {
            if u.is_empty() || step(&mut scene, &mut host, &mut neighbour, &mut u).is_err() {
                break;
            }
        }
        neighbour.check(&mut host);
    });
    scene.go(&mut host);
    neighbour.check(&mut host);
    neighbour.leave(&mut host);
}

fn word(u: &mut Unstructured) -> Result<Word> {
    let mut value = || {
        Ok(match u.arbitrary::<u8>()? {
            0..=63 => u.arbitrary()?,
            64..=127 => Guest::address(u.choose_index(USED)?),
            128..=159 => u64::MAX,
            byte => u64::from(byte) << u.int_in_range(0..=56)?,
        })
    };
    let values = [value()?, value()?];
    let page = u.choose_index(USED)?;
    let word = if u.arbitrary()? {
        u.choose_index(PAGE / 8)?
    } else {
        u.choose_index(48)?
    };
    Ok(Word {
        side: u.choose_index(2)?,
        at: page * PAGE / 8 + word,
        values,
    })
}

fn scribble(views: &[View; 2], words: &[Word], stop: &AtomicBool) {
    let mut turn = 0usize;
    while !stop.load(Ordering::Relaxed) {
        for word in words {
            views[word.side][word.at].store(word.values[turn % 2], Ordering::Relaxed);
        }
        turn = turn.wrapping_add(1);
        std::hint::spin_loop();
    }
}

fn step(
    scene: &mut Scene,
    host: &mut Host,
    neighbour: &mut Neighbour,
    u: &mut Unstructured,
) -> Result<()> {
    let what: u8 = u.arbitrary()?;
    let (side, other) = scene.choose(u)?;
    match what {
        0..=99 => side.post_send(other, u)?,
        100..=149 => side.post_recv(other, u)?,
        150..=199 => host.rounds(1),
        200..=209 => host.busy_round(),
        210..=219 => side.change_state(u)?,
        220..=229 => side.register_and_deregister(u)?,
        230..=239 => neighbour.check(host),
        _ => host.rounds(5),
    }
    Ok(())
}
