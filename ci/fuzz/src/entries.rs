// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target `entries`: two guests post arbitrary send and receive work requests to queue pairs of all
//! types, which are connected to each other. Each completion must be one of a work request that
//! was posted, and no memory may change but what was registered for that.
use arbitrary::{Result, Unstructured};

use crate::host::Host;
use crate::neighbour::Neighbour;
use crate::scene::Scene;

/// Steps of an input.
const MOST_STEPS: usize = 200;

/// Runs an input.
pub fn run(data: &[u8]) {
    let mut host = Host::new();
    let mut neighbour = Neighbour::new(&host);
    let privileged = data.last().is_some_and(|byte| byte & 1 != 0);
    let mut scene = Scene::new(&host, privileged, false);
    let mut u = Unstructured::new(data);
    for _ in 0..MOST_STEPS {
        if u.is_empty() || step(&mut scene, &mut host, &mut u).is_err() {
            break;
        }
    }
    neighbour.check(&mut host);
    scene.leave(&mut host, true);
    neighbour.check(&mut host);
    neighbour.leave(&mut host);
}

fn step(scene: &mut Scene, host: &mut Host, u: &mut Unstructured) -> Result<()> {
    let what: u8 = u.arbitrary()?;
    let (side, other) = scene.choose(u)?;
    match what {
        0..=119 => side.post_send(other, u)?,
        120..=179 => side.post_recv(other, u)?,
        180..=219 => host.rounds(1),
        220..=229 => host.busy_round(),
        230..=243 => side.change_state(u)?,
        244..=249 => side.take(true),
        250..=252 => {
            side.guest.rnic.stop();
            host.rounds(1);
            side.guest.start();
        }
        _ => host.rounds(10),
    }
    Ok(())
}
