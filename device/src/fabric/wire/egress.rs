// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The way out: frames of packets are written to a port, counted and captured.
use std::sync::Arc;

use super::capture::Capture;
use super::counters::Counters;
use super::frame::{self, Route};
use super::layer::plan::Plan;
use super::packet::{Packet, Payload};
use super::port::{Direction, Fate, Port};
use crate::engine::vm::{Congestion, PacketEvent, Uplink, Vm};
use crate::verbs::WcError;

/// The way out: a port, and the frame that is written.
#[derive(Debug)]
pub(super) struct Egress<P> {
    pub port: P,
    pub view: Arc<View>,
    /// The worker that it is of.
    pub worker: u16,
    /// A frame that does not leave, or that is captured.
    scratch: Vec<u8>,
}

/// What others see of a wire.
#[derive(Debug, Default)]
pub(crate) struct View {
    pub counters: Counters,
    pub capture: Arc<Capture>,
    /// Faults that are wanted.
    pub faults: Arc<Plan>,
}

/// Whether a packet was sent before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    First,
    Again,
    /// It is not sent again: its message ends with this error. It is captured.
    Over(WcError),
}

impl Attempt {
    /// `again`: it was sent before.
    pub(super) fn new(again: bool) -> Self {
        if again {
            Self::Again
        } else {
            Self::First
        }
    }
}

impl View {
    /// One whose frames are captured there.
    pub(crate) fn new(capture: Arc<Capture>) -> Self {
        Self {
            capture,
            ..Self::default()
        }
    }
}

impl<P: Port> Egress<P> {
    /// That of a worker.
    pub(super) fn new(port: P, view: Arc<View>, worker: u16) -> Self {
        Self {
            port,
            view,
            worker,
            scratch: Vec::new(),
        }
    }

    /// Sends a packet without payload, as [`Self::send`].
    pub(super) fn send_empty(
        &mut self,
        now: u64,
        vm: &Vm,
        route: Option<&Route>,
        packet: &Packet<'_>,
    ) {
        let nothing = Payload {
            len: 0,
            read: &mut |_| true,
        };
        self.send(now, vm, route, packet, nothing, Attempt::First);
    }

    /// Sends a packet of a VM at time `now`, if there is a way out. Otherwise it is lost, as packets
    /// may be. Returns false if its payload cannot be read.
    pub(super) fn send(
        &mut self,
        now: u64,
        vm: &Vm,
        route: Option<&Route>,
        packet: &Packet<'_>,
        mut payload: Payload<'_>,
        attempt: Attempt,
    ) -> bool {
        let Some((route, uplink)) = route.zip(vm.uplink()) else {
            self.scratch.resize(payload.len, 0);
            return (payload.read)(&mut self.scratch);
        };
        let Uplink {
            segment,
            congestion,
            ..
        } = uplink;
        let identification = self.port.identification(segment);
        let capable = congestion == Congestion::Window && packet.may_be_marked();
        let len = route.frame_len(packet, payload.len);
        let destination = route.addresses.destination;
        let captures = self.view.capture.is_on();
        let begun = match attempt {
            Attempt::Over(_) if !captures => return true,
            Attempt::Over(error) => Err(Fate::Over(error)),
            _ if !vm.port_is_up() => Err(Fate::Down),
            _ => self.port.begin(now, segment, destination, len),
        };
        let fate = match begun {
            Ok(space) => {
                if !frame::write(space, route, capable, identification, packet, &mut payload) {
                    return false;
                }
                if captures {
                    self.scratch.clear();
                    self.scratch.extend_from_slice(space);
                }
                self.port.end()
            }
            Err(fate) => {
                self.scratch.resize(len, 0);
                let space = &mut self.scratch;
                if !frame::write(space, route, capable, identification, packet, &mut payload) {
                    return false;
                }
                fate
            }
        };
        self.view.counters.sent(len, fate);
        if attempt == Attempt::Again {
            self.view.counters.again();
            vm.count_packet(self.worker, PacketEvent::SentAgain);
        }
        if captures {
            let comment = match (attempt, fate) {
                (Attempt::First, Fate::Sent) => None,
                (Attempt::Again, fate) => Some(format!("again: {fate}")),
                (_, fate) => Some(fate.to_string()),
            };
            let (capture, frame) = (&self.view.capture, &self.scratch);
            capture.add(now, Some(segment), Direction::Out, frame, comment);
        }
        true
    }
}
