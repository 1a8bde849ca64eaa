// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What goes over a connection that is established, and how that ends.

use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use virtio_rdma_spec::command::status;
use virtio_rdma_spec::iwarp::iw_event;
use virtio_rdma_spec::verbs::qp_state;

use super::connection::{Connection, Phase, Step};
use super::connections::{Entry, Here, Iwarp, Token, END, SILENCE};
use super::outgoing::Pool;
use super::stream::Stream;
use crate::engine::queue_pair::Qp;
use crate::engine::send_queue::{Polled, SendQueue};
use crate::engine::tables::Tables;
use crate::engine::Budget;
use crate::fabric::{self, Carrier};

/// A stream, as a queue pair is polled by.
struct StreamCarrier<'s> {
    stream: &'s mut Stream,
    pool: &'s mut Pool,
    /// What is left of the budget.
    left: Budget,
    failed: bool,
}

impl<'a> Carrier<'a> for StreamCarrier<'_> {
    fn send(
        &mut self,
        sq: &mut SendQueue,
        tables: &'a Tables,
        qp: &'a Arc<Qp>,
        now: u64,
        mut budget: Budget,
    ) -> Polled {
        let polled = self
            .stream
            .poll(self.pool, sq, tables, qp, now, &mut budget);
        self.left = budget;
        match polled {
            Ok(polled) => polled,
            Err(end) => {
                self.stream.tell(&end, &[]);
                qp.fail();
                self.failed = true;
                Polled::Again
            }
        }
    }

    fn flush(&mut self, sq: &mut SendQueue, tables: &'a Tables, qp: &'a Arc<Qp>, _: u64) {
        self.stream.flush(sq, tables, qp);
    }
}

impl Iwarp {
    /// Moves FPDUs of a connection.
    pub(super) fn stream(
        &mut self,
        token: Token,
        connection: &mut Connection,
        here: Here<'_>,
    ) -> Step {
        let Some(qp) = connection.qp.clone() else {
            return Step::Over(status::ECONNRESET);
        };
        let vm = connection.port.vm.clone();
        let Some(tables) = vm.read_in(here.section) else {
            return Step::Again;
        };
        if !tables.running {
            return Step::Later;
        }
        if qp.life() != connection.life || qp.dead.load(Ordering::SeqCst) {
            return Step::Over(status::ECONNRESET);
        }
        let mut sends = Step::Waits;
        if let (Phase::Accepted(_), Some(replied)) = (&connection.phase, connection.replied) {
            if here.now >= replied.saturating_add(SILENCE) {
                let kind = iw_event::ESTABLISHED;
                return self.begin_streaming(token, connection, kind, None, here);
            }
            sends = Step::Later;
        }
        if connection.writable && connection.waits_to_send() {
            match connection.pump(&mut self.pool, tables, &qp) {
                Ok(step) => sends = step,
                Err(status) => {
                    return self.end_stream(token, connection, tables, &qp, status, here)
                }
            }
            qp.schedule();
        }
        if !connection.readable {
            return sends;
        }
        let (came, ended) = match connection.fill(&mut self.space) {
            Ok(came) => came,
            Err(_) => return Step::Over(status::ECONNRESET),
        };
        if came != 0 {
            if matches!(connection.phase, Phase::Accepted(_)) {
                let kind = iw_event::ESTABLISHED;
                let step = self.begin_streaming(token, connection, kind, None, here);
                if let Step::Over(_) = step {
                    return step;
                }
            }
            let Phase::Streams(stream) = &mut connection.phase else {
                return Step::Over(status::ECONNRESET);
            };
            let bytes = self.space.get(..came).unwrap_or_default();
            match stream.take(bytes, tables, &qp) {
                Ok(taken) => {
                    let rest = bytes.get(taken..).unwrap_or_default();
                    if !stream.keep(rest) {
                        return Step::Over(status::ECONNRESET);
                    }
                }
                Err(_) => {
                    let status = status::ECONNRESET;
                    return self.end_stream(token, connection, tables, &qp, status, here);
                }
            }
            self.charge(vm.clone(), came as u64);
            if connection.writable && connection.waits_to_send() {
                match connection.pump(&mut self.pool, tables, &qp) {
                    Ok(step) => sends = step,
                    Err(status) => {
                        return self.end_stream(token, connection, tables, &qp, status, here)
                    }
                }
            }
        }
        if ended {
            let whole = match &connection.phase {
                Phase::Streams(stream) => stream.partial().is_empty(),
                _ => false,
            };
            return Step::Over(if whole { 0 } else { status::ECONNRESET });
        }
        if connection.readable {
            Step::Again
        } else {
            sends
        }
    }

    /// A stream has come to its end, by an error of one of both.
    pub(super) fn end_stream(
        &mut self,
        token: Token,
        connection: &mut Connection,
        tables: &Tables,
        qp: &Arc<Qp>,
        status: u16,
        here: Here<'_>,
    ) -> Step {
        qp.fail();
        if let Phase::Accepted(stream) | Phase::Streams(stream) = &mut connection.phase {
            stream.flush(&mut qp.send_queue(), tables, qp);
            stream.end();
            // What tells the peer why, if the socket takes it.
            let _ = stream.send(&mut self.pool, &connection.socket);
        }
        self.begin_to_close(token, connection, status, here)
    }

    /// Nothing more is sent: what the peer sends is of no interest any longer, but its end.
    pub(super) fn begin_to_close(
        &mut self,
        token: Token,
        connection: &mut Connection,
        status: u16,
        here: Here<'_>,
    ) -> Step {
        if connection.socket.shutdown(Shutdown::Write).is_err() {
            return Step::Over(status);
        }
        if let Phase::Accepted(stream) | Phase::Streams(stream) = &mut connection.phase {
            stream.give_back(&mut self.pool);
        }
        connection.phase = Phase::Closes(status);
        self.set_deadline(token, connection, Some(here.now.saturating_add(END)));
        Step::Again
    }

    /// A worker polls a queue pair that has, or had, a connection here. Returns what it led to, or
    /// `None` if its messages go another way.
    pub(crate) fn poll(
        &mut self,
        tables: &Tables,
        qp: &Arc<Qp>,
        here: Here<'_>,
        budget: Budget,
    ) -> Option<(Polled, Budget)> {
        let idle = Some((Polled::Idle, Budget::NONE));
        let token = self.of_qp.get(&qp.serial()).copied();
        let state = qp.state();
        let gone = qp.dead.load(Ordering::SeqCst);
        let Some(token) = token else {
            // Without a connection there is nothing to send.
            return idle.filter(|_| state == qp_state::RTS || gone);
        };
        let Some(Entry::Connection(mut connection)) = self.entries.remove(&token) else {
            return idle;
        };
        let alive = !gone && qp.life() == connection.life;
        let direct = matches!(connection.phase, Phase::Direct);
        let (polled, step) = match state {
            qp_state::RTS if alive && direct => (None, Step::Waits),
            qp_state::RTS | qp_state::SQD if alive && !direct => {
                let (polled, step) =
                    self.poll_stream(token, &mut connection, tables, qp, budget, here);
                (Some(polled), step)
            }
            // What has begun is carried out, and then the connection closes.
            qp_state::SQD if alive => (None, self.direct(token, &mut connection, here)),
            // It waits for its connection.
            qp_state::INIT if alive => (idle, Step::Waits),
            qp_state::ERR if alive => {
                let closes = matches!(connection.phase, Phase::Closes(_));
                let step = if closes {
                    Step::Waits
                } else {
                    self.fail(token, &mut connection, tables, qp, here)
                };
                // What is in its queues is flushed.
                (None, step)
            }
            _ => (idle, Step::Over(status::ECONNRESET)),
        };
        self.settle(token, connection, step, here);
        polled
    }

    /// Messages go directly to the other end: there is nothing to do before the queue pair closes.
    pub(super) fn direct(
        &mut self,
        token: Token,
        connection: &mut Connection,
        here: Here<'_>,
    ) -> Step {
        let closes = |qp: &Arc<Qp>| qp.state() == qp_state::SQD;
        match connection.qp.as_ref().filter(|qp| closes(qp)) {
            None => Step::Waits,
            Some(qp) if qp.send_queue().in_progress() => Step::Later,
            Some(_) => self.begin_to_close(token, connection, 0, here),
        }
    }

    /// The queue pair went to the error state: the peer is told by the end of the connection.
    pub(super) fn fail(
        &mut self,
        token: Token,
        connection: &mut Connection,
        tables: &Tables,
        qp: &Arc<Qp>,
        here: Here<'_>,
    ) -> Step {
        match &mut connection.phase {
            Phase::Accepted(_) | Phase::Streams(_) => {
                self.end_stream(token, connection, tables, qp, 0, here)
            }
            Phase::Direct => self.begin_to_close(token, connection, 0, here),
            _ => Step::Over(status::ECONNRESET),
        }
    }

    pub(super) fn poll_stream(
        &mut self,
        token: Token,
        connection: &mut Connection,
        tables: &Tables,
        qp: &Arc<Qp>,
        budget: Budget,
        here: Here<'_>,
    ) -> ((Polled, Budget), Step) {
        let Phase::Streams(stream) = &mut connection.phase else {
            return ((Polled::Idle, Budget::NONE), Step::Waits);
        };
        let mut carrier = StreamCarrier {
            stream,
            pool: &mut self.pool,
            left: budget,
            failed: false,
        };
        let polled = fabric::poll(&mut carrier, tables, qp, here.now, budget);
        let (failed, done) = (carrier.failed, carrier.left.spent(budget));
        let mut polled = (polled, done);
        let drained = qp.state() == qp_state::SQD
            && polled.0 == Polled::Idle
            && !qp.send_queue().in_progress();
        if connection.writable {
            match stream.send(&mut self.pool, &connection.socket) {
                Ok(true) => {}
                Ok(false) => connection.writable = false,
                Err(_) => return (polled, Step::Over(status::ECONNRESET)),
            }
        }
        // When the socket takes more, there is a poll again.
        if !connection.writable && polled.0 == Polled::Again {
            polled.0 = Polled::Idle;
        }
        if failed {
            let status = status::ECONNRESET;
            let step = self.end_stream(token, connection, tables, qp, status, here);
            return (polled, step);
        }
        if drained && stream.is_sent() {
            return (polled, self.begin_to_close(token, connection, 0, here));
        }
        (polled, Step::Waits)
    }
}
