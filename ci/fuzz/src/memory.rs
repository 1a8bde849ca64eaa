// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target `memory`: the regions of two guests' memory come and go while they have traffic. What
//! they have lies in all of the regions: rings, page tables, doorbells and what is registered. The
//! device writes to nothing that it was taken from, and serves the neighbour all the time.
use arbitrary::{Result, Unstructured};

use crate::host::{Host, PAGE, PAGES, REGIONS};
use crate::neighbour::Neighbour;
use crate::scene::Scene;

/// Steps of an input.
const MOST_STEPS: usize = 200;
/// Pages of a region in which there is something.
const USED: usize = 16;

/// Runs an input.
pub fn run(data: &[u8]) {
    let mut host = Host::new();
    let mut neighbour = Neighbour::new(&host);
    let privileged = data.last().is_some_and(|byte| byte & 1 != 0);
    let mut scene = Scene::new(&host, privileged, true);
    let mut u = Unstructured::new(data);
    let mut present = [[true; REGIONS]; 2];
    for _ in 0..MOST_STEPS {
        if u.is_empty() || step(&mut scene, &mut host, &mut present, &mut u).is_err() {
            break;
        }
    }
    neighbour.check(&mut host);
    // With all memory there, what was still under way goes on, or fails.
    for side in &scene.sides {
        side.guest.set_memory([true; REGIONS]);
    }
    scene.leave(&mut host, false);
    neighbour.check(&mut host);
    neighbour.leave(&mut host);
}

fn step(
    scene: &mut Scene,
    host: &mut Host,
    present: &mut [[bool; REGIONS]; 2],
    u: &mut Unstructured,
) -> Result<()> {
    let what: u8 = u.arbitrary()?;
    match what {
        // A region goes, or comes back.
        0..=39 => {
            let side = u.choose_index(2)?;
            let region = u.choose_index(REGIONS)?;
            present[side][region] ^= true;
            change(scene, host, side, present[side]);
        }
        // Another mapping of the same.
        40..=49 => {
            let side = u.choose_index(2)?;
            change(scene, host, side, present[side]);
        }
        50..=54 => {
            let side = u.choose_index(2)?;
            present[side] = u.arbitrary()?;
            change(scene, host, side, present[side]);
        }
        _ => {
            let (side, other) = scene.choose(u)?;
            match what {
                55..=139 => side.post_send(other, u)?,
                140..=189 => side.post_recv(other, u)?,
                190..=229 => host.rounds(1),
                230..=239 => host.busy_round(),
                240..=247 => side.change_state(u)?,
                248..=251 => side.take(false),
                _ => {
                    side.guest.rnic.stop();
                    host.rounds(1);
                    side.guest.start();
                }
            }
        }
    }
    Ok(())
}

/// Changes the memory of a side. What the device does then leaves alone what is not there.
fn change(scene: &Scene, host: &mut Host, side: usize, present: [bool; REGIONS]) {
    let guest = &scene.sides[side].guest;
    guest.set_memory(present);
    let used = |region: &usize| guest.view.get(region * PAGES / REGIONS * PAGE, USED * PAGE);
    let gone: Vec<_> = (0..REGIONS).filter(|region| !present[*region]).collect();
    let before: Vec<_> = gone.iter().map(used).collect();
    host.rounds(2);
    let after: Vec<_> = gone.iter().map(used).collect();
    assert!(before == after, "memory that was taken away has changed");
}
