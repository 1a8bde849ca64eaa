// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queue pairs that can be created and brought to RTS per second, one command after the other.
use std::time::Instant;

use anyhow::Result;

use super::bed::{self, Side};
use super::{figure, Settings};
use crate::figure::{Better, Figure};

const SECTION: &str = "set-up";

/// Measures.
pub fn run(settings: &Settings) -> Result<Vec<Figure>> {
    let count = if settings.quick { 200 } else { 2_000 };
    let process = bed::device(settings.cores, 2, "")?;
    let (a, b) = (
        bed::vm(&process, 0, 128 << 20)?,
        bed::vm(&process, 1, 128 << 20)?,
    );
    let (a, b) = (Side::new(&a, 4096)?, Side::new(&b, 4096)?);
    let peer = b.qp(16, 16)?;
    let [mut rates, mut commands] = [Vec::new(), Vec::new()];
    for _ in 0..settings.repetitions() {
        let start = Instant::now();
        let mut qps = Vec::with_capacity(count);
        for _ in 0..count {
            let qp = a.qp(16, 16)?;
            qp.connect(&bed::to_peer(&peer))?;
            qps.push(qp);
        }
        rates.push(count as f64 / start.elapsed().as_secs_f64());
        let start = Instant::now();
        for _ in 0..count {
            a.vm.query_port()?;
        }
        commands.push(start.elapsed().as_secs_f64() * 1e6 / count as f64);
    }
    Ok(vec![
        figure(
            SECTION,
            "queue pairs: CREATE_QP, then MODIFY_QP to INIT, RTR and RTS",
            "/s",
            Better::Higher,
            &rates,
        ),
        figure(
            SECTION,
            "a command that does nothing (QUERY_PORT)",
            "µs",
            Better::Lower,
            &commands,
        ),
    ])
}
