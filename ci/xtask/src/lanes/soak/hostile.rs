// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A hostile guest among the others of a soak: attacks of `ci/hostile`, drawn from the seed, one
//! after the other.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{sleep, JoinHandle};
use std::time::Duration;

use anyhow::{ensure, Result};
use virtio_rdma_hostile::{Attack, Attacker, Random, Victim};

/// What the attacker shares with those who start and stop it.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// The device process is away, or will be at once.
    away: AtomicBool,
    /// Rises when it goes and when it is back.
    restarts: AtomicU64,
    victims: Mutex<Vec<Victim>>,
    rounds: AtomicU64,
    failed: AtomicU64,
    messages: Mutex<Vec<String>>,
}

/// The attacker.
pub struct Hostile {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Rounds of attacks.
    pub rounds: u64,
    /// Those that were not refused as they should be.
    pub failed: u64,
    /// What went wrong.
    pub messages: Vec<String>,
}

impl Hostile {
    /// Starts it on a socket of its own.
    pub fn start(socket: PathBuf, seed: u64) -> Self {
        let shared = Arc::new(Shared::default());
        let of_thread = shared.clone();
        let thread = std::thread::spawn(move || {
            let attacker = Attacker {
                socket,
                victims: Vec::new(),
                random: Random::new(seed),
            };
            run(&of_thread, attacker);
        });
        Hostile {
            shared,
            thread: Some(thread),
        }
    }

    /// Who is there to be attacked.
    pub fn set_victims(&self, victims: Vec<Victim>) {
        let known = self.shared.victims.lock();
        *known.unwrap_or_else(PoisonError::into_inner) = victims;
    }

    /// The device process goes away, or is there again: attacks under way fail.
    pub fn device_is_away(&self, away: bool) {
        self.shared.restarts.fetch_add(1, Ordering::SeqCst);
        self.shared.away.store(away, Ordering::SeqCst);
    }

    /// Ends it after the round that is under way.
    pub fn stop(mut self) -> Result<Seen> {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            ensure!(thread.join().is_ok(), "the hostile guest panicked");
        }
        let messages = self.shared.messages.lock();
        Ok(Seen {
            rounds: self.shared.rounds.load(Ordering::SeqCst),
            failed: self.shared.failed.load(Ordering::SeqCst),
            messages: messages.unwrap_or_else(PoisonError::into_inner).clone(),
        })
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            // A panic in it was its own.
            let _ = thread.join();
        }
    }
}

fn run(shared: &Shared, mut attacker: Attacker) {
    let attacks: Vec<Attack> = virtio_rdma_hostile::ALL
        .iter()
        .copied()
        .flatten()
        .copied()
        .collect();
    while !shared.stop.load(Ordering::SeqCst) {
        if shared.away.load(Ordering::SeqCst) {
            sleep(Duration::from_millis(100));
            continue;
        }
        let restarts = shared.restarts.load(Ordering::SeqCst);
        let victims = shared.victims.lock();
        attacker.victims = victims.unwrap_or_else(PoisonError::into_inner).clone();
        let at = attacker.random.index(attacks.len());
        let Some(attack) = attacks.get(at) else {
            return;
        };
        let result = (attack.round)(&mut attacker);
        let disturbed = shared.restarts.load(Ordering::SeqCst) != restarts;
        match result {
            Ok(()) => {
                shared.rounds.fetch_add(1, Ordering::SeqCst);
            }
            Err(_) if disturbed => {}
            Err(error) => {
                shared.failed.fetch_add(1, Ordering::SeqCst);
                let messages = shared.messages.lock();
                let mut messages = messages.unwrap_or_else(PoisonError::into_inner);
                if messages.len() < 20 {
                    messages.push(format!("{}: {error:#}", attack.name));
                }
            }
        }
        // There is work for others, too.
        sleep(Duration::from_millis(100));
    }
}
