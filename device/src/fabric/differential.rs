// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The same programs on two fabrics: what a driver sees of them is the same.
use proptest::prelude::*;
use vhost_device_rdma_sync::{Reader, Readers};
use virtio_rdma_spec::ring::Cqe;
use virtio_rdma_spec::verbs::{mtu, qp_type, wc_flag};

use super::local::tests::Process;
use super::scenario::{
    carry_out, is_send, programs, requests, verify, Pair, Program, World, SECOND,
};
use super::wire::tests::{check_numbered, destination, post_numbered, simulations, Net};
use crate::engine::fixture::ON_HOSTS;
use crate::engine::message::GRH;
use crate::engine::vm::Uplink;

/// What a driver has seen at one end.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    state: u8,
    /// Completions of sends, and those of receives. (A fabric is free in the order of one to the
    /// other.)
    sent: Vec<String>,
    received: Vec<String>,
    events: Vec<(u16, u32)>,
}

impl Seen {
    /// Queue pairs have the number of their end, plus one, and keys none, since each has another one
    /// each time. A peer on the wire does not tell the reason of an error.
    fn at(pair: &mut Pair, end: usize) -> Self {
        let numbers = [0, 1].map(|end| pair.ends[end].qp.qp.number);
        let name = |number| {
            let end = numbers.iter().position(|known| *known == number);
            end.map_or(number, |end| end as u32 + 1)
        };
        let told = |cqe: Cqe| {
            let invalidates = cqe.wc_flags & wc_flag::WITH_INV != 0;
            let same = Cqe {
                qp_num: name(cqe.qp_num),
                src_qp: name(cqe.src_qp),
                vendor_err: 0,
                imm: if invalidates { 0 } else { cqe.imm },
                ..cqe
            };
            format!("{same:?}")
        };
        let (sent, received): (Vec<_>, Vec<_>) = pair.seen(end).into_iter().partition(is_send);
        let events = pair.ends[end].guest.events.take().into_iter();
        let mut events: Vec<_> = events.map(|(what, number)| (what, name(number))).collect();
        events.sort_unstable();
        Self {
            state: pair.state(end),
            sent: sent.into_iter().map(told).collect(),
            received: received.into_iter().map(told).collect(),
            events,
        }
    }
}

fn run<W: World>(
    world: impl Fn(Reader, &Pair) -> W,
    uplink: Option<Uplink>,
    pair: impl Fn((&Readers, Option<Uplink>)) -> Pair,
    program: &dyn Fn(&mut Pair, &mut W) -> Result<(), TestCaseError>,
) -> Result<[Seen; 2], TestCaseError> {
    let (readers, mut reader) = Readers::new(1);
    let mut pair = pair((&readers, uplink));
    let mut world = world(reader.pop().unwrap(), &pair);
    program(&mut pair, &mut world)?;
    Ok([0, 1].map(|end| Seen::at(&mut pair, end)))
}

proptest! {
    #![proptest_config(simulations())]

    #[test]
    fn simulated_messages_complete_alike(program in programs(), xrc: bool) {
        let (of, both) = if xrc {
            (qp_type::XRC_INI, false)
        } else {
            (qp_type::RC, program.both)
        };
        let program = Program { both, ..program };
        let pair = |on: (&Readers, Option<Uplink>)| {
            Pair::of(of, on, |attr| attr.path_mtu = program.path_mtu)
        };
        let local = run(Process::new, None, pair, &|pair, world| verify(&program, pair, world))?;
        let wire = run(Net::clean, ON_HOSTS, pair, &|pair, world| verify(&program, pair, world))?;
        prop_assert_eq!(local, wire);
    }

    #[test]
    fn simulated_requests_that_bring_something_complete_alike(
        requests in requests(),
        path_mtu in mtu::MTU_256..=mtu::MTU_4096,
        max_rd_atomic in 1..5u8,
        xrc: bool,
    ) {
        let of = if xrc { qp_type::XRC_INI } else { qp_type::RC };
        let pair = |on: (&Readers, Option<Uplink>)| {
            Pair::for_requests(of, on, path_mtu, max_rd_atomic)
        };
        let local = run(Process::new, None, pair, &|pair, world| carry_out(&requests, pair, world))?;
        let wire = run(Net::clean, ON_HOSTS, pair, &|pair, world| carry_out(&requests, pair, world))?;
        prop_assert_eq!(local, wire);
    }

    #[test]
    fn simulated_messages_without_answers_complete_alike(
        lens in proptest::collection::vec(0..4097u32, 1..24),
        path_mtu in mtu::MTU_256..=mtu::MTU_4096,
        datagrams: bool,
    ) {
        let (of, header) = if datagrams {
            (qp_type::UD, GRH as u32)
        } else {
            (qp_type::UC, 0)
        };
        let pair = |on: (&Readers, Option<Uplink>)| {
            Pair::of(of, on, |attr| attr.path_mtu = path_mtu)
        };
        let local = run(Process::new, None, pair, &|pair, world| {
            exchange(pair, world, &lens, header)
        })?;
        let wire = run(Net::clean, ON_HOSTS, pair, &|pair, world| {
            exchange(pair, world, &lens, header)
        })?;
        prop_assert_eq!(local, wire);
    }
}

/// Messages of these lengths that nobody answers: all arrive, after `header` bytes.
fn exchange(
    pair: &mut Pair,
    world: &mut impl World,
    lens: &[u32],
    header: u32,
) -> Result<(), TestCaseError> {
    let to = destination(pair);
    let places = post_numbered(pair, lens, |send| {
        if header != 0 {
            send.to = to;
        }
    });
    world.run(pair, SECOND);
    let arrived = check_numbered(pair, lens, &places, header)?;
    prop_assert_eq!(arrived, (0..lens.len()).collect::<Vec<_>>());
    Ok(())
}
