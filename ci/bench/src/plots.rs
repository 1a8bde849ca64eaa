// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The plots of the report, as SVG.
use std::fs;
use std::path::Path;

use anyhow::{anyhow, Context, Result};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{register_font, FontStyle};

use crate::figure::{Better, Figure, Part};
use crate::report::{number, place, Report};

/// Size of a plot, pixels.
const SIZE: (u32, u32) = (1000, 560);
/// Where Debian's package fonts-dejavu-core has the font.
const FONTS: &str = "/usr/share/fonts/truetype/dejavu";
const FAMILY: &str = "sans-serif";

/// What is ours.
const OURS: RGBColor = RGBColor(0, 90, 181);
/// More of ours.
const OURS_TOO: RGBColor = RGBColor(86, 160, 233);
/// What it is compared with.
const PEERS: [RGBColor; 3] = [
    RGBColor(120, 120, 120),
    RGBColor(213, 94, 0),
    RGBColor(0, 130, 95),
];

type Area<DB> = DrawingArea<DB, Shift>;

/// Something to draw.
enum Picture {
    /// Bars beside each other.
    Bars(Bars),
    /// One or two charts of curves.
    Curves(Vec<Chart>),
}

/// A bar chart, lying.
struct Bars {
    title: String,
    axis: String,
    /// The axis is logarithmic.
    log: bool,
    /// Names of colours.
    legend: Vec<(String, RGBColor)>,
    /// Bars of a group have the same label and follow each other.
    bars: Vec<Bar>,
}

struct Bar {
    label: String,
    value: f64,
    unit: String,
    color: RGBColor,
}

/// How an axis counts.
#[derive(Clone, Copy, PartialEq)]
enum Scale {
    /// From zero.
    Linear,
    /// By powers of a number.
    Log(f64),
}

impl Scale {
    fn map(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::Log(base) => value.max(f64::MIN_POSITIVE).log(base),
        }
    }

    fn text(self, at: f64) -> String {
        match self {
            Self::Linear if at == at.round() => format!("{at:.0}"),
            Self::Linear => format!("{at}"),
            Self::Log(base) if (at - at.round()).abs() < 1e-6 => plain(base.powf(at.round())),
            Self::Log(_) => String::new(),
        }
    }

    /// The range that shows these values.
    fn range(self, values: impl Iterator<Item = f64> + Clone) -> std::ops::Range<f64> {
        let most = values.clone().fold(f64::NEG_INFINITY, f64::max);
        let least = values.fold(f64::INFINITY, f64::min);
        match self {
            Self::Linear => 0.0..most * 1.1,
            Self::Log(_) => (self.map(least) - 1e-3).floor()..(self.map(most) + 1e-3).ceil(),
        }
    }
}

fn plain(value: f64) -> String {
    if value >= 1.0 {
        place(value.round())
    } else {
        format!("{value}")
    }
}

/// A chart of curves.
struct Chart {
    title: String,
    x: (String, Scale),
    y: (String, Scale),
    curves: Vec<Curve>,
    /// The vertical axis reaches at least this.
    reach: f64,
    /// Where curves leave room for their names.
    legend: SeriesLabelPosition,
}

/// Name, colour and points.
type Curve = (String, RGBColor, Vec<(f64, f64)>);

/// Draws all plots that there are figures for; returns their names, without the ending, and what
/// they show.
///
/// # Errors
/// If the font is missing, or something cannot be written.
pub fn draw(report: &Report, directory: &Path) -> Result<Vec<(String, String)>> {
    font()?;
    fs::create_dir_all(directory)?;
    let mut names = Vec::new();
    for (name, picture) in pictures(report) {
        let path = directory.join(&name);
        let svg = path.with_extension("svg");
        let root = SVGBackend::new(&svg, SIZE).into_drawing_area();
        paint(&root, &picture).with_context(|| format!("cannot draw {}", svg.display()))?;
        let about = match &picture {
            Picture::Bars(bars) => bars.title.clone(),
            Picture::Curves(charts) => charts
                .iter()
                .map(|chart| chart.title.as_str())
                .collect::<Vec<_>>()
                .join("; "),
        };
        names.push((name, about));
    }
    Ok(names)
}

/// Name of the plot of a section.
fn file(part: Part, section: &str) -> String {
    let prefix = match part {
        Part::Native => "bench",
        Part::Vm => "bench-vm",
    };
    format!("{prefix}-{}", section.to_lowercase().replace(' ', "-"))
}

/// Whether a plot is that of a section.
#[must_use]
pub fn belongs(plot: &str, part: Part, section: &str) -> bool {
    plot == file(part, section)
}

fn font() -> Result<()> {
    for (style, name) in [
        (FontStyle::Normal, "DejaVuSans.ttf"),
        (FontStyle::Bold, "DejaVuSans-Bold.ttf"),
    ] {
        let path = Path::new(FONTS).join(name);
        let bytes = fs::read(&path).with_context(|| {
            format!(
                "cannot read {} (cargo xtask setup installs it)",
                path.display()
            )
        })?;
        // They are used until the end of the process, which draws once.
        register_font(FAMILY, style, Box::leak(bytes.into_boxed_slice()))
            .map_err(|_| anyhow!("{} is no font", path.display()))?;
    }
    Ok(())
}

/// Figures of a section of the native part.
fn native<'a>(report: &'a Report, section: &'a str) -> impl Iterator<Item = &'a Figure> + Clone {
    let figures = report.figures.iter();
    figures.filter(move |figure| figure.part == Part::Native && figure.section == section)
}

/// The points of a curve, from what `value` takes of figures.
fn points<'a>(
    figures: impl Iterator<Item = &'a Figure>,
    name: &str,
    value: impl Fn(&Figure) -> Option<f64>,
) -> Vec<(f64, f64)> {
    figures
        .filter(|figure| figure.name == name)
        .filter_map(|figure| Some((figure.x?, value(figure)?)))
        .collect()
}

/// The names of curves in the order of their first points.
fn names<'a>(figures: impl Iterator<Item = &'a Figure>) -> Vec<&'a str> {
    let mut names = Vec::new();
    for figure in figures {
        if !names.contains(&figure.name.as_str()) {
            names.push(&figure.name);
        }
    }
    names
}

/// All plots that there are figures for.
fn pictures(report: &Report) -> Vec<(String, Picture)> {
    let mut all = Vec::new();
    let mut add = |section: &str, picture: Option<Picture>| {
        all.extend(picture.map(|picture| (file(Part::Native, section), picture)));
    };
    add("latency", latency(report));
    add("message rate", message_rate(report));
    add("active queue pairs", queue_pairs(report));
    add("bandwidth", bandwidth(report));
    add("registration", registration(report));
    add("key lookup", lookup(report));
    add("VMs", vms(report));
    let vm = || report.figures.iter().filter(|f| f.part == Part::Vm);
    let mut sections: Vec<&str> = Vec::new();
    for figure in vm() {
        if !sections.contains(&figure.section.as_str()) {
            sections.push(&figure.section);
        }
    }
    for section in sections {
        let figures: Vec<&Figure> = vm().filter(|f| f.section == section).collect();
        let title = format!("Between two VMs: {section}");
        let picture = if figures.iter().all(|figure| figure.x.is_some()) {
            by_size(&figures, &title)
        } else {
            beside_peers(&figures, &title, true)
        };
        all.extend(picture.map(|picture| (file(Part::Vm, section), picture)));
    }
    all
}

/// Every figure beside all its peers. The axis is that of the first figure's unit.
fn beside_peers(figures: &[&Figure], title: &str, log: bool) -> Option<Picture> {
    let first = figures.first()?;
    let mut legend = vec![("virtio-rdma".to_owned(), OURS)];
    let mut bars: Vec<Bar> = Vec::new();
    let label = |figure: &Figure| match figure.x {
        Some(x) => format!("{}, {}", figure.name, place(x)),
        None => figure.name.clone(),
    };
    let same = |figure: &&&Figure| figure.unit == first.unit;
    for figure in figures.iter().filter(same) {
        if bars.iter().any(|bar| bar.label == label(figure)) {
            continue;
        }
        let mut bar = |value, color| {
            bars.push(Bar {
                label: label(figure),
                value,
                unit: figure.unit.clone(),
                color,
            });
        };
        bar(figure.value, OURS);
        let twins = figures
            .iter()
            .filter(|other| other.name == figure.name && other.x == figure.x);
        for peer in twins.filter_map(|twin| twin.peer.as_ref()) {
            let color = match legend.iter().find(|(name, _)| *name == peer.name) {
                Some((_, color)) => *color,
                None => {
                    let color = PEERS[(legend.len() - 1) % PEERS.len()];
                    legend.push((peer.name.clone(), color));
                    color
                }
            };
            bar(peer.value, color);
        }
    }
    let better = match first.better {
        Better::Lower => "less is better",
        Better::Higher => "more is better",
    };
    let scale = if log { ", logarithmic" } else { "" };
    Some(Picture::Bars(Bars {
        title: title.to_owned(),
        axis: format!("{} ({better}{scale})", first.unit),
        log,
        legend,
        bars,
    }))
}

/// A curve over message sizes beside its peer's.
fn by_size(figures: &[&Figure], title: &str) -> Option<Picture> {
    let first = figures.first()?;
    let of_peer = |figure: &Figure| figure.peer.as_ref().map(|peer| peer.value);
    let line = |value: &dyn Fn(&Figure) -> Option<f64>| {
        // What is too small to be told from nothing cannot be on a logarithmic axis.
        points(figures.iter().copied(), &first.name, value)
            .into_iter()
            .filter(|(_, value)| *value > 0.0)
            .collect::<Vec<_>>()
    };
    let mut curves = vec![(
        "virtio-rdma".to_owned(),
        OURS,
        line(&|figure| Some(figure.value)),
    )];
    if let Some(peer) = &first.peer {
        curves.push((peer.name.clone(), PEERS[0], line(&of_peer)));
    }
    Some(Picture::Curves(vec![Chart {
        title: format!("{title}, {}", first.name),
        x: ("message size, bytes".to_owned(), Scale::Log(4.0)),
        y: (first.unit.clone(), Scale::Log(10.0)),
        curves,
        reach: 0.0,
        legend: SeriesLabelPosition::UpperLeft,
    }]))
}

/// Ours beside the model, the floor and other libraries, each once.
fn latency(report: &Report) -> Option<Picture> {
    let figures = || native(report, "latency");
    let mut bars: Vec<Bar> = Vec::new();
    let mut add = |label: &str, value: f64, color| {
        if !bars.iter().any(|bar| bar.label == label) {
            bars.push(Bar {
                label: label.to_owned(),
                value,
                unit: "µs".to_owned(),
                color,
            });
        }
    };
    let peers = |word: &'static str| {
        figures()
            .filter(move |figure| figure.name.contains(word))
            .filter_map(|figure| figure.peer.as_ref())
    };
    for (word, kind) in [("post to completion", 0), ("ping-pong", 1)] {
        let mut own: Vec<&crate::Peer> = peers(word).collect();
        own.sort_by(|a, b| a.value.total_cmp(&b.value));
        for peer in own {
            let label = match (kind, peer.name.as_str()) {
                (0, "model") => "model (no checks), post to completion".to_owned(),
                (1, name) => format!("{name}, ping-pong one way"),
                (_, name) => name.to_owned(),
            };
            let color = match peer.name.as_str() {
                "model" => PEERS[2],
                _ if kind == 0 => PEERS[0],
                _ => PEERS[1],
            };
            add(&label, peer.value, color);
        }
        for figure in figures().filter(|figure| figure.name.contains(word)) {
            add(&figure.name, figure.value, OURS);
        }
    }
    (!bars.is_empty()).then(|| {
        Picture::Bars(Bars {
            title: "Latency of 8 bytes, without VMs: median".to_owned(),
            axis: "µs (less is better)".to_owned(),
            log: false,
            legend: vec![
                ("virtio-rdma".to_owned(), OURS),
                (
                    "the model: the same hand-overs, no checks".to_owned(),
                    PEERS[2],
                ),
                ("cache lines between the two cores".to_owned(), PEERS[0]),
                ("libraries over shared memory".to_owned(), PEERS[1]),
            ],
            bars,
        })
    })
}

fn message_rate(report: &Report) -> Option<Picture> {
    let figures: Vec<&Figure> = native(report, "message rate").collect();
    beside_peers(
        &figures,
        "Messages of 64 bytes, one queue pair, without VMs",
        false,
    )
}

fn queue_pairs(report: &Report) -> Option<Picture> {
    let figures = || native(report, "active queue pairs");
    let name = *names(figures()).first()?;
    let own = points(figures(), name, |figure| Some(figure.value));
    let mut curves = vec![("virtio-rdma".to_owned(), OURS, own.clone())];
    let model = native(report, "message rate")
        .filter_map(|figure| figure.peer.as_ref())
        .find(|peer| peer.name == "model");
    if let (Some(model), Some((from, _)), Some((to, _))) = (model, own.first(), own.last()) {
        let line = vec![(*from, model.value), (*to, model.value)];
        curves.push(("model, one queue pair".to_owned(), PEERS[2], line));
    }
    Some(Picture::Curves(vec![Chart {
        title: "WRITEs of 64 bytes in lists of 32, in turn over queue pairs".to_owned(),
        x: ("active queue pairs".to_owned(), Scale::Log(10.0)),
        y: ("million/s".to_owned(), Scale::Linear),
        curves,
        reach: 0.0,
        legend: SeriesLabelPosition::LowerLeft,
    }]))
}

fn bandwidth(report: &Report) -> Option<Picture> {
    let figures = || native(report, "bandwidth");
    let of_memcpy = |figure: &Figure| {
        let peer = figure.peer.as_ref()?;
        (peer.name == "memcpy").then_some(peer.value)
    };
    let mut charts = Vec::new();
    for pages in ["contiguous", "scattered"] {
        let mut curves = Vec::new();
        let own = names(figures());
        let mut own = own.iter().filter(|name| name.contains(pages));
        let memcpy = points(figures(), own.clone().next()?, of_memcpy);
        curves.push(("memcpy, same buffers".to_owned(), PEERS[1], memcpy));
        for color in [OURS, OURS_TOO] {
            let Some(name) = own.next() else { break };
            let mut line = points(figures(), name, |figure| Some(figure.value));
            line.dedup();
            let label = name.split(',').next().unwrap_or(name);
            curves.push((label.to_owned(), color, line));
        }
        charts.push(Chart {
            title: match pages {
                "contiguous" => "Bandwidth, contiguous guest pages".to_owned(),
                _ => "Bandwidth, scattered 4 KiB pages".to_owned(),
            },
            x: ("message size, bytes".to_owned(), Scale::Log(4.0)),
            y: ("GB/s".to_owned(), Scale::Linear),
            curves,
            reach: 0.0,
            legend: SeriesLabelPosition::UpperRight,
        });
    }
    Some(Picture::Curves(charts))
}

fn registration(report: &Report) -> Option<Picture> {
    let figures = || native(report, "registration");
    let mut curves: Vec<_> = names(figures())
        .into_iter()
        .zip([OURS, OURS_TOO])
        .map(|(name, color)| {
            let line = points(figures(), name, |figure| Some(figure.value));
            // What is too quick to be told from nothing cannot be on a logarithmic axis.
            let line = line.into_iter().filter(|(_, value)| *value > 0.0).collect();
            (name.to_owned(), color, line)
        })
        .collect();
    let target = figures().find_map(|figure| match figure.target? {
        crate::Target::Max(most) => Some((figure.x?, most)),
        crate::Target::Min(_) => None,
    });
    if let Some((x, most)) = target {
        let line = vec![(x / 2.0, most), (x * 2.0, most)];
        curves.push((
            format!("target: {} µs for {}", number(most), place(x)),
            PEERS[1],
            line,
        ));
    }
    figures().next().map(|_| {
        Picture::Curves(vec![Chart {
            title: "Registering memory of scattered 4 KiB pages: time in the device".to_owned(),
            x: ("size, bytes".to_owned(), Scale::Log(4.0)),
            y: ("µs".to_owned(), Scale::Log(10.0)),
            curves,
            reach: 0.0,
            legend: SeriesLabelPosition::UpperLeft,
        }])
    })
}

fn lookup(report: &Report) -> Option<Picture> {
    let figures = || native(report, "key lookup");
    figures().next()?;
    // So that they can be compared: the same scale for both.
    let reach = figures().map(|figure| figure.value).fold(0.0, f64::max);
    let charts = [
        (
            "WRITE of 8 bytes, by regions that exist",
            "memory regions",
            10.0,
            "by their number",
        ),
        (
            "WRITE of 8 bytes, by size of the region",
            "size of the region, bytes",
            4.0,
            "by its size",
        ),
    ]
    .map(|(title, axis, base, which)| {
        let own = names(figures())
            .into_iter()
            .filter(|name| name.contains(which));
        let curves = own.zip([OURS, OURS_TOO]).map(|(name, color)| {
            let label = name.split(',').next().unwrap_or(name);
            let line = points(figures(), name, |figure| Some(figure.value));
            (label.to_owned(), color, line)
        });
        Chart {
            title: title.to_owned(),
            x: (axis.to_owned(), Scale::Log(base)),
            y: ("ns for a WRITE, in lists of 32".to_owned(), Scale::Linear),
            curves: curves.collect(),
            reach,
            legend: SeriesLabelPosition::UpperLeft,
        }
    });
    Some(Picture::Curves(charts.into()))
}

fn vms(report: &Report) -> Option<Picture> {
    let figures = || native(report, "VMs");
    figures().next()?;
    let charts = names(figures()).into_iter().map(|name| {
        let unit = figures().find(|figure| figure.name == name);
        let line = points(figures(), name, |figure| Some(figure.value));
        Chart {
            title: name.to_owned(),
            x: ("pairs of VMs".to_owned(), Scale::Log(2.0)),
            y: (
                unit.map_or(String::new(), |figure| figure.unit.clone()),
                Scale::Linear,
            ),
            curves: vec![("virtio-rdma".to_owned(), OURS, line)],
            reach: 0.0,
            legend: SeriesLabelPosition::LowerRight,
        }
    });
    Some(Picture::Curves(charts.collect()))
}

fn paint<DB: DrawingBackend>(root: &Area<DB>, picture: &Picture) -> Result<()>
where
    DB::ErrorType: 'static,
{
    root.fill(&WHITE)?;
    match picture {
        Picture::Bars(bars) => paint_bars(root, bars)?,
        Picture::Curves(charts) => {
            for (area, chart) in root.split_evenly((1, charts.len())).iter().zip(charts) {
                paint_chart(area, chart, charts.len())?;
            }
        }
    }
    root.present()?;
    Ok(())
}

fn text(size: i32) -> TextStyle<'static> {
    (FAMILY, size).into_font().color(&BLACK)
}

fn aligned(size: i32, horizontal: HPos) -> TextStyle<'static> {
    text(size).pos(Pos::new(horizontal, VPos::Center))
}

fn paint_bars<DB: DrawingBackend>(root: &Area<DB>, bars: &Bars) -> Result<()>
where
    DB::ErrorType: 'static,
{
    let (width, height) = (SIZE.0 as i32, SIZE.1 as i32);
    let bold = (FAMILY, 22, FontStyle::Bold).into_font().color(&BLACK);
    root.draw(&Text::new(
        bars.title.clone(),
        (width / 2, 26),
        bold.pos(Pos::new(HPos::Center, VPos::Center)),
    ))?;
    // The legend, in a row.
    let mut x = 24;
    for (name, color) in &bars.legend {
        root.draw(&Rectangle::new([(x, 52), (x + 14, 66)], color.filled()))?;
        root.draw(&Text::new(
            name.clone(),
            (x + 20, 59),
            aligned(14, HPos::Left),
        ))?;
        let (text_width, _) = root.estimate_text_size(name, &text(14))?;
        x += text_width as i32 + 48;
    }
    let label_width = bars
        .bars
        .iter()
        .filter_map(|bar| root.estimate_text_size(&bar.label, &text(14)).ok())
        .map(|(width, _)| width as i32)
        .max()
        .unwrap_or(0)
        .min(width / 2);
    let (left, right, top, bottom) = (label_width + 36, width - 110, 84, height - 56);
    let scale = if bars.log {
        Scale::Log(10.0)
    } else {
        Scale::Linear
    };
    let range = scale.range(bars.bars.iter().map(|bar| bar.value));
    let at = |value: f64| {
        let part = (value - range.start) / (range.end - range.start);
        left + (part.clamp(0.0, 1.0) * f64::from(right - left)) as i32
    };
    // The axis.
    for tick in ticks(&range, scale, 8.0) {
        let x = at(tick);
        root.draw(&PathElement::new(
            [(x, top), (x, bottom)],
            RGBColor(220, 220, 220).stroke_width(1),
        ))?;
        root.draw(&Text::new(
            scale.text(tick),
            (x, bottom + 14),
            aligned(14, HPos::Center),
        ))?;
    }
    root.draw(&Text::new(
        bars.axis.clone(),
        ((left + right) / 2, height - 18),
        aligned(16, HPos::Center),
    ))?;
    // Groups have a gap between them.
    let groups = bars
        .bars
        .windows(2)
        .filter(|pair| pair[0].label != pair[1].label)
        .count()
        + 1;
    let step = f64::from(bottom - top) / (bars.bars.len() as f64 + 0.5 * groups as f64);
    let thickness = step.min(34.0) * 0.92;
    let mut y = f64::from(top) + step * 0.25;
    for (i, bar) in bars.bars.iter().enumerate() {
        let first = i == 0 || bars.bars[i - 1].label != bar.label;
        if first && i > 0 {
            y += step * 0.5;
        }
        let (from, to) = (y as i32, (y + thickness) as i32);
        let middle = (from + to) / 2;
        if first {
            root.draw(&Text::new(
                bar.label.clone(),
                (left - 10, middle),
                aligned(14, HPos::Right),
            ))?;
        }
        let end = at(scale.map(bar.value));
        root.draw(&Rectangle::new(
            [(left, from), (end, to)],
            bar.color.filled(),
        ))?;
        root.draw(&Text::new(
            format!("{} {}", number(bar.value), bar.unit),
            (end + 6, middle),
            aligned(14, HPos::Left),
        ))?;
        y += step;
    }
    root.draw(&PathElement::new(
        [(left, top), (left, bottom)],
        BLACK.stroke_width(1),
    ))?;
    Ok(())
}

/// Places for lines and numbers on an axis, so many at most.
fn ticks(range: &std::ops::Range<f64>, scale: Scale, most: f64) -> Vec<f64> {
    let span = range.end - range.start;
    let step = match scale {
        Scale::Log(_) => (span / most).ceil().max(1.0),
        Scale::Linear => {
            let rough = span / most;
            let power = 10f64.powf(rough.log10().floor());
            let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
            *steps.iter().find(|step| **step >= rough).unwrap_or(&rough)
        }
    };
    let first = (range.start / step).ceil() as i64;
    let last = ((range.end + 1e-9) / step).floor() as i64;
    // Rounded, so that 0.3 is not 0.30000000000000004.
    (first..=last)
        .map(|i| (i as f64 * step * 1e9).round() / 1e9)
        .collect()
}

fn paint_chart<DB: DrawingBackend>(root: &Area<DB>, chart: &Chart, columns: usize) -> Result<()>
where
    DB::ErrorType: 'static,
{
    let all = || chart.curves.iter().flat_map(|(_, _, line)| line.iter());
    let x_range = {
        let xs = all().map(|(x, _)| chart.x.1.map(*x));
        let least = xs.clone().fold(f64::INFINITY, f64::min);
        let most = xs.fold(f64::NEG_INFINITY, f64::max);
        least - (most - least) * 0.02..most + (most - least) * 0.04
    };
    let highest = all().map(|(_, y)| *y).fold(chart.reach, f64::max);
    let y_range = chart.y.1.range(all().map(|(_, y)| *y).chain([highest]));
    let title_size = if columns > 1 { 16 } else { 22 };
    let mut builder = ChartBuilder::on(root);
    builder
        .caption(
            &chart.title,
            (FAMILY, title_size, FontStyle::Bold)
                .into_font()
                .color(&BLACK),
        )
        .margin(16)
        .margin_right(28)
        .x_label_area_size(52)
        .y_label_area_size(72);
    let mut context = builder.build_cartesian_2d(x_range.clone(), y_range.clone())?;
    let (x_scale, y_scale) = (chart.x.1, chart.y.1);
    // Numbers are written by hand: plotters would not put them at the powers of a base.
    context
        .configure_mesh()
        .disable_mesh()
        .x_desc(&chart.x.0)
        .y_desc(&chart.y.0)
        .axis_desc_style(text(15))
        .x_labels(0)
        .y_labels(0)
        .draw()?;
    let plot = context.plotting_area();
    let grey = RGBColor(222, 222, 222);
    let (pixels_x, pixels_y) = plot.get_pixel_range();
    for tick in ticks(&y_range, y_scale, 8.0) {
        plot.draw(&PathElement::new(
            [(x_range.start, tick), (x_range.end, tick)],
            grey.stroke_width(1),
        ))?;
        let (_, y) = plot.map_coordinate(&(x_range.start, tick));
        label(
            root,
            &y_scale.text(tick),
            (pixels_x.start - 8, y),
            HPos::Right,
        )?;
    }
    for tick in ticks(&x_range, x_scale, 12.0 / columns as f64) {
        plot.draw(&PathElement::new(
            [(tick, y_range.start), (tick, y_range.end)],
            grey.stroke_width(1),
        ))?;
        let (x, _) = plot.map_coordinate(&(tick, y_range.start));
        label(
            root,
            &x_scale.text(tick),
            (x, pixels_y.end + 14),
            HPos::Center,
        )?;
    }
    for (name, color, line) in &chart.curves {
        let line: Vec<(f64, f64)> = line
            .iter()
            .map(|(x, y)| (x_scale.map(*x), y_scale.map(*y)))
            .collect();
        let color = *color;
        context
            .draw_series(LineSeries::new(line.iter().copied(), color.stroke_width(3)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 22, y)], color.stroke_width(3)));
        context.draw_series(line.iter().map(|at| Circle::new(*at, 4, color.filled())))?;
    }
    context
        .configure_series_labels()
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(160, 160, 160))
        .label_font(text(14))
        .position(chart.legend.clone())
        .margin(12)
        .legend_area_size(30)
        .draw()?;
    Ok(())
}

/// Writes a number at a place of the whole picture.
fn label<DB: DrawingBackend>(
    root: &Area<DB>,
    words: &str,
    (x, y): (i32, i32),
    position: HPos,
) -> Result<()>
where
    DB::ErrorType: 'static,
{
    let (origin, _) = root.get_pixel_range();
    root.draw(&Text::new(
        words.to_owned(),
        (x - origin.start, y),
        aligned(13, position),
    ))?;
    Ok(())
}
