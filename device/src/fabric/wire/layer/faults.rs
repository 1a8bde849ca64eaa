// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Faults: a layer around a port that loses, repeats, delays and damages frames of the devices that
//! have faults planned, on the way out and on the way in. Other frames pass as they are.
//!
//! What becomes of a frame depends on the seed and the number of the frame alone, so that any
//! failure can be had again; with a limit or a rate, also on when there were frames before it.
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::super::frame;
use super::super::port::{Burst, Direction, Fate, Port};
use super::plan::{count, FaultCounts, Plan, Planned, Station};
use super::settings::Chance;
use crate::engine::tables::Gid;
use crate::engine::vm::Segment;

/// Bytes of frames that are held back, at most; what comes then is lost.
const MOST_HELD: usize = 64 << 20;
/// How often those that wait to be let go are looked after, nanoseconds.
const OFTEN: u64 = 1_000_000;

/// A port with faults.
#[derive(Debug)]
pub(crate) struct Faults<P> {
    inner: P,
    plan: Arc<Plan>,
    /// Of the plan that `lines` are from.
    generation: u64,
    lines: Vec<Line>,
    /// Where the frame that is written goes, if it may have faults; when that began.
    to: Option<(Segment, Gid)>,
    now: u64,
    held: HeldFrames,
    /// Frames that are let go.
    let_go: VecDeque<Waiting>,
    /// Frames that came and whose time is there.
    due: VecDeque<(Segment, Vec<u8>)>,
}

/// Frames that are held back.
#[derive(Debug, Default)]
struct HeldFrames {
    /// By the time at which they go on, and a number that tells those apart that go on at the same time.
    list: BTreeMap<(u64, u64), Held>,
    serial: u64,
    bytes: usize,
}

/// A frame that is held back.
#[derive(Debug)]
struct Held {
    way: Way,
    frame: Vec<u8>,
}

/// A frame that waits to be let go, with what is decided of it already.
#[derive(Debug)]
struct Waiting {
    planned: Arc<Planned>,
    course: Course,
    held: Held,
}

/// Where a frame goes on to.
#[derive(Debug, Clone, Copy)]
enum Way {
    Out(Segment, Gid),
    In(Segment),
}

/// The faults of a device in a direction, as they go on.
#[derive(Debug)]
struct Line {
    planned: Arc<Planned>,
    odds: Odds,
    /// The number of the next frame.
    number: u64,
    /// Frames are being lost, one after the other.
    losing: bool,
    /// When frames were lost or damaged, as far as that counts for the limit.
    suffered: VecDeque<u64>,
    /// When the last frame has gone, with a limited rate.
    free_at: u64,
    /// Frames that wait to be let go, in order.
    waiting: VecDeque<Waiting>,
}

/// How often something happens, of 2^64.
#[derive(Debug)]
struct Odds {
    /// A frame begins a burst of losses; it is the last one of it.
    lose: u64,
    last: u64,
    damage: u64,
    duplicate: u64,
    mark: u64,
    reorder: u64,
}

/// What happens to a frame: its fate, when it goes on if it does not at once, and when it comes for
/// the second time.
#[derive(Debug)]
struct Course {
    /// The number of the frame.
    number: u64,
    fate: Fate,
    at: u64,
    again: Option<u64>,
}

/// A number that depends on its arguments alone (splitmix64).
fn draw(seed: u64, frame: u64, what: u64) -> u64 {
    let mut z = seed
        .wrapping_add(frame.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .wrapping_add(what.wrapping_mul(0xd1b5_4a32_d192_ed03));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn nanoseconds(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Odds {
    fn new(planned: &Planned) -> Self {
        let of = |part: f64| (part * 2f64.powi(64)) as u64;
        let settings = &planned.settings;
        let (Chance(loss), burst) = (settings.loss, f64::from(settings.burst));
        // So that of all frames `loss` are in bursts, which have `burst` each.
        let begins = if loss < 1.0 {
            loss / (loss + burst * (1.0 - loss))
        } else {
            1.0
        };
        Self {
            lose: of(begins),
            last: of(1.0 / burst),
            damage: of(settings.damage.0),
            duplicate: of(settings.duplicate.0),
            mark: of(settings.mark.0),
            reorder: of(settings.reorder.0),
        }
    }
}

impl Line {
    fn new(planned: Arc<Planned>) -> Self {
        Self {
            odds: Odds::new(&planned),
            planned,
            number: 0,
            losing: false,
            suffered: VecDeque::new(),
            free_at: 0,
            waiting: VecDeque::new(),
        }
    }

    fn draw(&self, number: u64, what: u64) -> u64 {
        // What happens to a frame says nothing about the one with its number the other way.
        let direction = match self.planned.direction {
            Direction::Out => 0,
            Direction::In => 1 << 32,
        };
        draw(self.planned.settings.seed, number, direction | what)
    }

    /// Whether as many frames as there may be have been lost or damaged by time `now`.
    fn enough(&mut self, now: u64) -> bool {
        let Some((most, time)) = self.planned.settings.limit else {
            return false;
        };
        let past = |at: &u64| at.saturating_add(nanoseconds(time)) <= now;
        while self.suffered.front().is_some_and(past) {
            self.suffered.pop_front();
        }
        self.suffered.len() >= most
    }

    /// A frame is lost or damaged at time `now`.
    fn suffer(&mut self, now: u64) {
        if self.planned.settings.limit.is_some() {
            self.suffered.push_back(now);
        }
    }

    /// Whether frame `number` is one that is lost.
    fn loses(&mut self, number: u64) -> bool {
        self.losing |= self.draw(number, 0) < self.odds.lose;
        let lost = self.losing;
        if lost && self.draw(number, 6) < self.odds.last {
            self.losing = false;
        }
        lost || self.planned.settings.dooms(number)
    }

    /// When a frame of so many bytes has gone, at the rate that there is; `None` if too many wait.
    fn gone(&mut self, now: u64, bytes: usize) -> Option<u64> {
        let Some(rate) = self.planned.settings.rate else {
            return Some(now);
        };
        let start = self.free_at.max(now);
        let time = |bytes: u64| u128::from(bytes) * 8_000_000_000 / u128::from(rate);
        if u128::from(start - now) > time(self.planned.settings.queue) {
            return None;
        }
        let takes = u64::try_from(time(bytes as u64)).unwrap_or(u64::MAX);
        self.free_at = start.saturating_add(takes);
        Some(self.free_at)
    }

    /// Whether as many bytes wait for the rate as a router says that it is congested with.
    fn congested(&self, now: u64) -> bool {
        let settings = &self.planned.settings;
        let (Some(rate), Some(from)) = (settings.rate, settings.mark_from) else {
            return false;
        };
        let waits = u128::from(self.free_at.saturating_sub(now));
        waits * u128::from(rate) > u128::from(from) * 8_000_000_000
    }

    /// Says which frame is the first one that waits to be let go.
    fn tell_waiting(&self) {
        let first = self.waiting.front();
        let first = first.map(|waiting| waiting.course.number);
        self.planned.set_waits(first);
    }

    /// What happens to the next frame; one bit of it may be damaged.
    fn judge(&mut self, now: u64, frame: &mut [u8]) -> Course {
        let number = self.number;
        self.number += 1;
        let planned = self.planned.clone();
        let (settings, counts) = (&planned.settings, &planned.counts);
        count(&counts.frames);
        let spared = self.enough(now);
        let ends = |fate| Course {
            number,
            fate,
            at: now,
            again: None,
        };
        if !settings.concerns(number, frame) {
            return ends(Fate::Sent);
        }
        if self.loses(number) && !spared {
            count(&counts.lost);
            self.suffer(now);
            return ends(Fate::Lost(number));
        }
        let marks = self.congested(now) || self.draw(number, 9) < self.odds.mark;
        let Some(mut at) = self.gone(now, frame.len()) else {
            count(&counts.overrun);
            return ends(Fate::Lost(number));
        };
        let mut fate = Fate::Sent;
        if marks && frame::mark(frame) {
            count(&counts.marked);
            fate = Fate::Marked(number);
        }
        if self.draw(number, 1) < self.odds.damage && !spared {
            count(&counts.damaged);
            self.suffer(now);
            let bit = self.draw(number, 2) % (8 * frame.len() as u64).max(1);
            let place = usize::try_from(bit / 8).unwrap_or_default();
            if let Some(byte) = frame.get_mut(place) {
                *byte ^= 1 << (bit % 8);
            }
            fate = Fate::Damaged(number);
        }
        let (least, most) = settings.delay;
        let (least, most) = (nanoseconds(least), nanoseconds(most));
        if most != 0 {
            at = at.saturating_add(least + self.draw(number, 8) % (most - least + 1));
        }
        let later = |what| {
            let time = nanoseconds(settings.reorder_time).max(1);
            at.saturating_add(1 + self.draw(number, what) % time)
        };
        let again = (self.draw(number, 5) < self.odds.duplicate).then(|| later(7));
        let reordered = self.draw(number, 3) < self.odds.reorder;
        let when = if reordered { later(4) } else { at };
        if again.is_some() {
            count(&counts.repeated);
        }
        if reordered {
            count(&counts.reordered);
        }
        if !matches!(fate, Fate::Damaged(_)) {
            if again.is_some() {
                fate = Fate::Repeated(number);
            } else if when != now {
                fate = Fate::Delayed(number);
            }
        }
        Course {
            number,
            fate,
            at: when,
            again,
        }
    }
}

impl HeldFrames {
    /// A frame goes on, later or not at all. Returns its fate.
    fn take_over(
        &mut self,
        now: u64,
        line: &mut Line,
        course: Course,
        way: Way,
        frame: &[u8],
    ) -> Fate {
        let counts = &line.planned.counts;
        let lost = matches!(course.fate, Fate::Lost(_));
        if lost || (line.waiting.is_empty() && !line.planned.holds(course.number)) {
            return self.keep(now, &course, way, frame, counts);
        }
        if self.bytes + frame.len() > MOST_HELD {
            count(&counts.overrun);
            return Fate::Lost(course.number);
        }
        self.bytes += frame.len();
        let fate = Fate::Delayed(course.number);
        let frame = frame.to_vec();
        line.waiting.push_back(Waiting {
            planned: line.planned.clone(),
            course,
            held: Held { way, frame },
        });
        line.tell_waiting();
        fate
    }

    /// Holds a frame back until time `at`. Returns false if too many are: it is lost, and counted.
    fn add(&mut self, at: u64, way: Way, frame: &[u8], counts: &FaultCounts) -> bool {
        if self.bytes + frame.len() > MOST_HELD {
            count(&counts.overrun);
            return false;
        }
        self.bytes += frame.len();
        self.serial += 1;
        let frame = frame.to_vec();
        self.list.insert((at, self.serial), Held { way, frame });
        true
    }

    /// Holds back what goes on after `now` of a frame. Returns the fate of the frame.
    fn keep(
        &mut self,
        now: u64,
        course: &Course,
        way: Way,
        frame: &[u8],
        counts: &FaultCounts,
    ) -> Fate {
        let Course {
            number,
            fate,
            at,
            again,
        } = *course;
        let later = at > now;
        if later && !self.add(at, way, frame, counts) {
            return Fate::Lost(number);
        }
        let twice = again.is_none_or(|again| self.add(again, way, frame, counts));
        match fate {
            Fate::Repeated(_) if !twice && later => Fate::Delayed(number),
            Fate::Repeated(_) if !twice => Fate::Sent,
            fate => fate,
        }
    }

    /// Takes the first frame that goes on until now, and when it does.
    fn take(&mut self, now: u64) -> Option<(u64, Held)> {
        let entry = self.list.first_entry()?;
        let (at, _) = *entry.key();
        if at > now {
            return None;
        }
        let held = entry.remove();
        self.bytes -= held.frame.len();
        Some((at, held))
    }
}

impl<P: Port> Faults<P> {
    /// A port whose faults are those of a plan.
    pub(crate) fn new(inner: P, plan: Arc<Plan>) -> Self {
        Self {
            inner,
            plan,
            generation: 0,
            lines: Vec::new(),
            to: None,
            now: 0,
            held: HeldFrames::default(),
            let_go: VecDeque::new(),
            due: VecDeque::new(),
        }
    }

    /// Follows the plan. Returns whether there are any faults.
    fn follow(&mut self) -> bool {
        let generation = self.plan.generation();
        if generation != self.generation {
            self.generation = generation;
            let mut known = std::mem::take(&mut self.lines);
            for planned in self.plan.list() {
                let same = |line: &Line| Arc::ptr_eq(&line.planned, &planned);
                let line = known.iter().position(same).map(|at| known.swap_remove(at));
                self.lines.push(line.unwrap_or_else(|| Line::new(planned)));
            }
            // Those of faults that there are no longer, and those whose number is below another one now.
            for line in &mut known {
                self.let_go.append(&mut line.waiting);
            }
            for line in &mut self.lines {
                let waits = |waiting: &Waiting| line.planned.holds(waiting.course.number);
                let gone = line.waiting.partition_point(|waiting| !waits(waiting));
                self.let_go.extend(line.waiting.drain(..gone));
            }
        }
        !self.lines.is_empty()
    }

    /// Lets go on what was held back until now.
    fn release(&mut self, now: u64) {
        self.now = now;
        let any = !self.let_go.is_empty();
        while let Some(Waiting {
            planned,
            course,
            held: Held { way, frame },
        }) = self.let_go.pop_front()
        {
            self.held.bytes -= frame.len();
            let fate = self.held.keep(now, &course, way, &frame, &planned.counts);
            if matches!(fate, Fate::Lost(_)) || course.at > now {
                continue;
            }
            match way {
                Way::Out(segment, destination) => {
                    self.pass(now, segment, destination, &frame);
                }
                Way::In(segment) => self.due.push_back((segment, frame)),
            }
        }
        if any {
            self.lines.iter().for_each(Line::tell_waiting);
        }
        while let Some((at, Held { way, frame })) = self.held.take(now) {
            match way {
                Way::Out(segment, destination) => {
                    self.pass(at, segment, destination, &frame);
                }
                Way::In(segment) => self.due.push_back((segment, frame)),
            }
        }
    }

    /// Sends a frame by the port itself.
    fn pass(&mut self, now: u64, segment: Segment, destination: Gid, frame: &[u8]) -> Fate {
        let begun = self.inner.begin(now, segment, destination, frame.len());
        match begun {
            Ok(space) => space.copy_from_slice(frame),
            Err(fate) => return fate,
        }
        self.inner.end()
    }
}

/// The faults of the device that a frame is of; `None` if that has none.
fn line_of<'a>(
    lines: &'a mut [Line],
    direction: Direction,
    segment: Segment,
    frame: &[u8],
) -> Option<&'a mut Line> {
    let station = station(direction, segment, frame)?;
    let of =
        |line: &&mut Line| line.planned.direction == direction && line.planned.station == station;
    lines.iter_mut().find(of)
}

/// The device that a frame is of.
fn station(direction: Direction, segment: Segment, frame: &[u8]) -> Option<Station> {
    let mac = match direction {
        Direction::Out => frame.get(6..12),
        Direction::In => frame.get(..6),
    };
    Some((segment, mac?.try_into().ok()?))
}

impl<P: Port> Port for Faults<P> {
    fn identification(&self, segment: Segment) -> u16 {
        self.inner.identification(segment)
    }

    fn begin(
        &mut self,
        now: u64,
        segment: Segment,
        destination: Gid,
        len: usize,
    ) -> Result<&mut [u8], Fate> {
        if !self.follow() {
            self.to = None;
            return self.inner.begin(now, segment, destination, len);
        }
        self.release(now);
        self.to = Some((segment, destination));
        self.inner.begin(now, segment, destination, len)
    }

    fn written(&mut self) -> &mut [u8] {
        self.inner.written()
    }

    fn end(&mut self) -> Fate {
        let Some((segment, destination)) = self.to else {
            return self.inner.end();
        };
        let (now, frame) = (self.now, self.inner.written());
        let line = line_of(&mut self.lines, Direction::Out, segment, frame);
        let Some(line) = line else {
            return self.inner.end();
        };
        let course = line.judge(now, frame);
        let at = course.at;
        let way = Way::Out(segment, destination);
        let fate = self.held.take_over(now, line, course, way, frame);
        if matches!(fate, Fate::Lost(_)) || at > now || !line.waiting.is_empty() {
            return fate;
        }
        match self.inner.end() {
            Fate::Sent => fate,
            other => other,
        }
    }

    #[inline(always)]
    fn flush(&mut self) -> u64 {
        self.inner.flush()
    }

    fn receive(&mut self, now: u64, burst: &mut Burst) -> bool {
        let faults = self.follow();
        self.release(now);
        if !self.due.is_empty() {
            burst.fill(&mut self.due);
            return true;
        }
        if !self.inner.receive(now, burst) {
            return false;
        }
        if faults {
            burst.judge(|segment, frame| {
                let line = line_of(&mut self.lines, Direction::In, segment, frame)?;
                let course = line.judge(now, frame);
                let (number, at) = (course.number, course.at);
                let fate = self
                    .held
                    .take_over(now, line, course, Way::In(segment), frame);
                let later = at > now && !matches!(fate, Fate::Lost(_));
                Some(if later { Fate::Delayed(number) } else { fate })
            });
        }
        true
    }

    fn timer(&self) -> Option<u64> {
        let held = self.held.list.keys().next().map(|(at, _)| *at);
        let due = (!self.due.is_empty() || !self.let_go.is_empty()).then_some(0);
        let waits = self.lines.iter().any(|line| !line.waiting.is_empty());
        let often = waits.then(|| self.now.saturating_add(OFTEN));
        held.into_iter()
            .chain(due)
            .chain(often)
            .chain(self.inner.timer())
            .min()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::port::sim::{Network, SimPort};
    use super::super::settings::FaultSettings;
    use super::*;

    const HERE: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const THERE: [u8; 6] = [2, 0, 0, 0, 0, 2];
    /// How long a frame takes, nanoseconds.
    const LATENCY: u64 = 1000;
    const SEGMENT: Segment = Segment::Vxlan(0);

    /// Two ports of a network.
    struct Two {
        ports: [Faults<SimPort>; 2],
        now: u64,
    }

    impl Two {
        fn new() -> Self {
            let network = Network::new(LATENCY);
            let port = |mac| Faults::new(network.port(mac, 9000), Arc::default());
            Self {
                ports: [port(HERE), port(THERE)],
                now: 0,
            }
        }

        /// Frames of the first end have faults in a direction.
        fn set(&self, direction: Direction, faults: &str) {
            let faults: Option<FaultSettings> = faults.parse().ok();
            let plan = &self.ports[0].plan;
            plan.set((SEGMENT, HERE), direction, faults);
        }

        fn counts(&self, name: &str) -> u64 {
            let list = self.ports[0].plan.list();
            let mut counts = list.iter().flat_map(|one| one.counts.list());
            counts.find(|(known, _)| *known == name).unwrap().1
        }

        /// Sends a frame with a number from an end to the other.
        fn send(&mut self, from: usize, number: u16) -> Fate {
            let mut frame = [0; 100];
            let [source, destination] = if from == 0 {
                [HERE, THERE]
            } else {
                [THERE, HERE]
            };
            frame[..6].copy_from_slice(&destination);
            frame[6..12].copy_from_slice(&source);
            frame[12..14].copy_from_slice(&number.to_be_bytes());
            self.ports[from].send(self.now, SEGMENT, [1; 16], &frame)
        }

        /// What has come to an end by a time: when, and which.
        fn received(&mut self, end: usize, until: u64) -> Vec<(u64, u16)> {
            let mut all = Vec::new();
            let mut burst = Burst::default();
            loop {
                for port in &mut self.ports {
                    port.flush();
                }
                let other = &mut self.ports[1 - end];
                other.follow();
                other.release(self.now);
                while self.ports[end].receive(self.now, &mut burst) {
                    for (_, frame, gone) in burst.frames() {
                        if gone.is_none() {
                            let number = u16::from_be_bytes([frame[12], frame[13]]);
                            all.push((self.now, number));
                        }
                    }
                }
                let next = self.ports.iter().filter_map(Port::timer).min();
                match next {
                    Some(next) if next <= until => self.now = next.max(self.now + 1),
                    _ => return all,
                }
            }
        }
    }

    fn numbers(came: &[(u64, u16)]) -> Vec<u16> {
        came.iter().map(|(_, number)| *number).collect()
    }

    #[test]
    fn frames_wait_from_a_number_on_until_they_are_let_go() {
        for (direction, from) in [(Direction::Out, 0), (Direction::In, 1)] {
            let mut two = Two::new();
            let hold = |two: &Two, number| {
                let plan = &two.ports[0].plan;
                plan.hold((SEGMENT, HERE), direction, number)
            };
            let held = |two: &Two| {
                let plan = &two.ports[0].plan;
                let first = plan.list().first().cloned();
                first.map(|planned| plan.hold(planned.station, direction, Some(7)).1)
            };
            assert_eq!(hold(&two, Some(5)), (0, None));
            for number in 0..10 {
                two.send(from, number);
            }
            assert_eq!(numbers(&two.received(1 - from, 10_000)), [0, 1, 2, 3, 4]);
            assert_eq!(hold(&two, Some(5)), (10, Some(5)));
            assert_eq!(two.ports[0].held.bytes, 5 * 100);
            // Those before the next number go on, and only then the first that waits is another one.
            assert_eq!(hold(&two, Some(7)), (10, Some(5)));
            let end = two.now + 10_000;
            assert_eq!(numbers(&two.received(1 - from, end)), [5, 6]);
            assert_eq!(held(&two), Some(Some(7)));
            // What comes later waits behind them.
            two.send(from, 10);
            hold(&two, None);
            let end = two.now + 10_000;
            assert_eq!(numbers(&two.received(1 - from, end)), [7, 8, 9, 10]);
            assert_eq!(hold(&two, None), (11, None));
            assert_eq!(two.ports[0].held.bytes, 0);
            // Other faults let all go.
            hold(&two, Some(11));
            two.send(from, 11);
            let end = two.now + 10_000;
            assert!(two.received(1 - from, end).is_empty());
            two.set(direction, "seed=1");
            let end = two.now + 10_000;
            assert_eq!(numbers(&two.received(1 - from, end)), [11]);
        }
    }

    #[test]
    fn the_same_seed_direction_and_number_have_the_same_fate() {
        let faults = "seed=5,loss=20%,damage=10%,duplicate=10%,reorder=10%";
        let all = |from: usize, direction| {
            let mut two = Two::new();
            two.set(direction, faults);
            let fates: Vec<_> = (0..1000).map(|number| two.send(from, number)).collect();
            let came = numbers(&two.received(1 - from, 1 << 30));
            let counts = ["lost", "damaged", "duplicated", "reordered"];
            (fates, came, counts.map(|name| two.counts(name)))
        };
        let (fates, came, counts) = all(0, Direction::Out);
        assert_eq!(
            all(0, Direction::Out),
            (fates.clone(), came.clone(), counts)
        );
        let (untold, there, counted) = all(1, Direction::In);
        assert!(untold.iter().all(|fate| *fate == Fate::Sent));
        assert!(fates[..20].iter().any(|fate| *fate != Fate::Sent));
        assert_ne!(counted, counts);
        for (came, counts) in [(came, counts), (there, counted)] {
            let [lost, damaged, duplicated, reordered] = counts;
            assert!((150..250).contains(&lost));
            for count in [damaged, duplicated, reordered] {
                assert!((50..110).contains(&count), "{counts:?}");
            }
            // A damaged destination is nobody's.
            let most = (1000 - lost + duplicated) as usize;
            assert!(came.len() <= most && came.len() + 20 > most);
            let sorted = came.windows(2).all(|two| two[0] <= two[1]);
            assert!(!sorted, "some came later than others");
        }
    }

    #[test]
    fn losses_come_in_bursts_and_are_as_many_as_was_said() {
        for burst in [1, 8] {
            let mut two = Two::new();
            two.set(Direction::Out, &format!("seed=1,loss=10%,burst={burst}"));
            let lost: Vec<bool> = (0..60_000u32)
                .map(|number| matches!(two.send(0, number as u16), Fate::Lost(_)))
                .collect();
            let count = lost.iter().filter(|lost| **lost).count();
            assert!((5000..7000).contains(&count), "{burst}: {count}");
            let begins = lost.windows(2).filter(|two| !two[0] && two[1]).count();
            let mean = count as f64 / begins as f64;
            let expected = if burst == 1 { 1.11 } else { 8.0 };
            assert!((mean / expected - 1.0).abs() < 0.15, "{burst}: {mean}");
        }
    }

    #[test]
    fn chosen_frames_are_lost_and_a_change_begins_anew() {
        let mut two = Two::new();
        two.set(Direction::Out, "lose=2..3");
        for number in 0..6 {
            let fate = two.send(0, number);
            let doomed = matches!(number, 2 | 3);
            assert_eq!(fate == Fate::Lost(u64::from(number)), doomed);
        }
        two.set(Direction::Out, "lose=0");
        assert_eq!(two.send(0, 6), Fate::Lost(0));
        assert_eq!(two.counts("frames"), 1);
        two.set(Direction::Out, "off");
        assert_eq!(two.send(0, 7), Fate::Sent);
        assert_eq!(numbers(&two.received(1, 1 << 30)), [0, 1, 4, 5, 7]);
        two.set(Direction::Out, "loss=100%,frames=1..2");
        let lost = (0..4).filter(|number| two.send(0, *number) != Fate::Sent);
        assert_eq!(lost.collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn frames_wait_as_long_as_was_said_and_keep_their_order() {
        let mut two = Two::new();
        two.set(Direction::Out, "delay=1ms");
        for number in 0..3 {
            assert_eq!(two.send(0, number), Fate::Delayed(u64::from(number)));
        }
        let at = 1_000_000 + LATENCY;
        assert_eq!(two.received(1, 1 << 30), [(at, 0), (at, 1), (at, 2)]);
        // What waits comes though the faults have ended.
        two.send(0, 3);
        two.set(Direction::Out, "off");
        let from = two.now;
        assert_eq!(two.received(1, 1 << 30), [(from + at, 3)]);
        two.set(Direction::In, "delay=2ms..3ms");
        let from = two.now;
        two.send(1, 4);
        let came = two.received(0, 1 << 40);
        assert!((2_000_000..3_000_000).contains(&(came[0].0 - from - LATENCY)));
    }

    #[test]
    fn a_rate_spreads_frames_and_its_queue_has_an_end() {
        let mut two = Two::new();
        // 100 bytes take 1 ms.
        two.set(Direction::Out, "rate=800k,queue=1000");
        let fates: Vec<_> = (0..20).map(|number| two.send(0, number)).collect();
        let lost = fates.iter().filter(|fate| matches!(fate, Fate::Lost(_)));
        assert_eq!(lost.count(), 9);
        assert_eq!(two.counts("overrun"), 9);
        let came = two.received(1, 1 << 30);
        let expected = (0..11).map(|n: u16| ((u64::from(n) + 1) * 1_000_000 + LATENCY, n));
        assert_eq!(came, expected.collect::<Vec<_>>());
    }

    #[test]
    fn a_router_says_that_it_is_congested_if_so_many_bytes_wait() {
        let mut two = Two::new();
        two.set(Direction::Out, "rate=800k,queue=1000,mark-from=250");
        let capable = |number: u16| {
            let mut frame = [0; 100];
            frame[..6].copy_from_slice(&THERE);
            frame[6..12].copy_from_slice(&HERE);
            frame[12..16].copy_from_slice(&[8, 0, 0x45, 2]);
            frame[18..20].copy_from_slice(&number.to_be_bytes());
            frame
        };
        for number in 0..6 {
            let frame = capable(number);
            two.ports[0].send(0, SEGMENT, [1; 16], &frame);
        }
        // The fourth one finds three that wait.
        assert_eq!(two.counts("marked"), 3);
        two.received(1, 1 << 30);
        two.set(Direction::Out, "mark=100%");
        let frame = capable(7);
        let fate = two.ports[0].send(two.now, SEGMENT, [1; 16], &frame);
        assert_eq!(fate, Fate::Marked(0));
        let mut burst = Burst::default();
        two.ports[0].flush();
        assert!(two.ports[1].receive(two.now + LATENCY, &mut burst));
        let (_, came, _) = burst.frames().next().unwrap();
        assert_eq!((came[15], frame::checksum(&came[14..34])), (3, 0));
    }

    #[test]
    fn no_more_is_held_back_than_there_is_room_for() {
        let mut two = Two::new();
        two.set(Direction::Out, "delay=1s");
        let fits = MOST_HELD / 100;
        for number in 0..fits + 5 {
            let held = number < fits;
            let number = number as u64;
            let expected = if held {
                Fate::Delayed(number)
            } else {
                Fate::Lost(number)
            };
            assert_eq!(two.send(0, number as u16), expected);
        }
        assert_eq!(two.counts("overrun"), 5);
        assert_eq!(two.received(1, 2_000_000_000).len(), fits);
        assert_eq!(two.ports[0].held.bytes, 0);
    }

    #[test]
    fn a_second_one_that_finds_no_room_is_not_told_of() {
        let mut two = Two::new();
        two.set(Direction::Out, "duplicate=100%,reorder-time=1s");
        two.ports[0].held.bytes = MOST_HELD - 100;
        assert_eq!(two.send(0, 0), Fate::Repeated(0));
        assert_eq!(two.send(0, 1), Fate::Sent);
        assert_eq!(two.counts("overrun"), 1);
        assert_eq!(numbers(&two.received(1, 2_000_000_000)), [0, 1, 0]);
    }

    #[test]
    fn what_came_and_finds_no_room_is_lost() {
        let mut two = Two::new();
        two.set(Direction::In, "delay=1s");
        two.ports[0].held.bytes = MOST_HELD - 100;
        two.send(1, 0);
        two.send(1, 1);
        let mut burst = Burst::default();
        let mut fates = Vec::new();
        two.ports[1].flush();
        while two.ports[0].receive(LATENCY, &mut burst) {
            fates.extend(burst.frames().map(|(_, _, gone)| gone));
        }
        assert_eq!(fates, [Some(Fate::Delayed(0)), Some(Fate::Lost(1))]);
        assert_eq!(two.counts("overrun"), 1);
    }

    #[test]
    fn others_pass_as_they_are() {
        let mut two = Two::new();
        two.set(Direction::Out, "loss=100%");
        let other = (SEGMENT, [2, 0, 0, 0, 0, 9]);
        let plan = &two.ports[1].plan;
        plan.set(other, Direction::Out, "loss=1".parse().ok());
        assert_eq!(two.send(0, 1), Fate::Lost(0));
        assert_eq!(two.send(1, 2), Fate::Sent);
        assert_eq!(numbers(&two.received(0, 1 << 30)), [2]);
    }
}
