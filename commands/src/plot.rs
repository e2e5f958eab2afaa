//! Line plots as files: SVG, whose text keeps the reader's sans-serif, and PNG, which is drawn with DejaVu Sans.

use std::error::Error;
use std::ops::Range;
use std::path::Path;

use mlx_bun::checkpoint::atomic_file::write_bytes_atomically;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use crate::error::Complaint;

const SIZE: (u32, u32) = (960, 540);
const FONT: &str = "sans-serif";
const TITLE_SIZE: u32 = 22;
const TEXT_SIZE: u32 = 15;
const MARKER_SIZE: i32 = 4;
/// Half the width of an error bar's end, in pixels.
const BAR_SIZE: i32 = 4;
/// Of the axes around the data: a share of its extent.
const MARGIN: f64 = 0.05;
/// Okabe and Ito's colours, which colour-blind people can tell apart.
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
];

/// A measured value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Where on the horizontal axis.
    pub x: f64,
    /// The value.
    pub y: f64,
    /// How far it may be off, drawn as a bar to both sides.
    pub error: Option<f64>,
}

/// Values that belong together, joined by a line in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// What the legend calls it.
    pub name: String,
    /// Its values.
    pub points: Vec<Point>,
}

/// A plot of lines. Points that cannot be shown (not finite, or not positive on a logarithmic axis) are left out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LinePlot {
    /// Above the plot.
    pub title: String,
    /// Below the horizontal axis.
    pub x_label: String,
    /// Beside the vertical axis.
    pub y_label: String,
    /// Whether the horizontal axis is logarithmic.
    pub log_x: bool,
    /// Whether the vertical axis is logarithmic.
    pub log_y: bool,
    /// Whether horizontal values are milliseconds since 1970.
    pub x_is_time: bool,
    /// The lines.
    pub series: Vec<Series>,
}

/// What a file's extension says.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Svg,
    Png,
}

fn format_of(path: &Path) -> Result<Format, Complaint> {
    match path.extension().and_then(|extension| extension.to_str()).map(str::to_lowercase).as_deref() {
        Some("svg") => Ok(Format::Svg),
        Some("png") => Ok(Format::Png),
        _ => Err(Complaint::usage(format!("`{}` is neither a .svg nor a .png file", path.display()))
            .hint("end its name in .svg or .png")),
    }
}

/// Checks before the work that a plot could be written there.
///
/// # Errors
/// Another extension.
pub fn check(path: &Path) -> Result<(), Complaint> {
    format_of(path).map(|_| ())
}

impl LinePlot {
    /// Draws into a file, `.svg` or `.png`, which is replaced as a whole.
    ///
    /// # Errors
    /// Another extension, nothing to show, or a file that cannot be written.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let format = format_of(path)?;
        let shown = self.shown();
        if shown.series.iter().all(|series| series.points.is_empty()) {
            return Err(Complaint::failure("there is nothing to plot").into());
        }
        register_font(FONT, FontStyle::Normal, dejavu::sans::regular())
            .map_err(|_| Complaint::failure("the font of plots cannot be read"))?;
        let failed = |error: Box<dyn Error>| Complaint::failure(format!("cannot draw the plot: {error}"));
        let bytes = match format {
            Format::Svg => {
                let mut text = String::new();
                shown.draw(SVGBackend::with_string(&mut text, SIZE)).map_err(failed)?;
                text.into_bytes()
            }
            Format::Png => {
                let drawn = Drawn::beside(path);
                shown.draw(BitMapBackend::new(&drawn.0, SIZE)).map_err(failed)?;
                std::fs::read(&drawn.0)?
            }
        };
        Ok(write_bytes_atomically(path, &bytes)?)
    }

    /// Without points that have no place on the axes.
    fn shown(&self) -> Self {
        let fits = |value: f64, log: bool| value.is_finite() && (!log || value > 0.0);
        let mut plot = self.clone();
        for series in &mut plot.series {
            series.points.retain(|point| fits(point.x, self.log_x) && fits(point.y, self.log_y));
        }
        plot.series.retain(|series| !series.points.is_empty());
        plot
    }

    fn points(&self) -> impl Iterator<Item = Point> {
        self.series.iter().flat_map(|series| series.points.iter().copied())
    }

    fn draw<DB: DrawingBackend>(&self, backend: DB) -> Result<(), Box<dyn Error>>
    where
        DB::ErrorType: 'static,
    {
        let root = backend.into_drawing_area();
        root.fill(&WHITE)?;
        let x = range(self.points().map(|point| point.x), self.log_x);
        let ends = self.points().flat_map(|point| {
            let error = point.error.filter(|error| error.is_finite()).unwrap_or(0.0);
            [point.y - error, point.y + error, point.y]
        });
        let y = range(ends.filter(|end| !self.log_y || *end > 0.0), self.log_y);
        match (self.log_x, self.log_y) {
            (false, false) => self.chart(&root, x, y.clone(), y)?,
            (true, false) => self.chart(&root, x.log_scale(), y.clone(), y)?,
            (false, true) => self.chart(&root, x, y.clone().log_scale(), y)?,
            (true, true) => self.chart(&root, x.log_scale(), y.clone().log_scale(), y)?,
        }
        root.present()?;
        Ok(())
    }

    fn chart<DB, X, Y>(
        &self,
        root: &DrawingArea<DB, Shift>,
        x: X,
        y: Y,
        y_range: Range<f64>,
    ) -> Result<(), Box<dyn Error>>
    where
        DB: DrawingBackend,
        DB::ErrorType: 'static,
        X: AsRangedCoord<Value = f64>,
        X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        let mut chart = ChartBuilder::on(root)
            .caption(&self.title, (FONT, TITLE_SIZE))
            .margin(16)
            .x_label_area_size(48)
            .y_label_area_size(72)
            .build_cartesian_2d(x, y)?;
        let (first, last) = self.points().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), point| {
            (low.min(point.x), high.max(point.x))
        });
        let at = |value: &f64| match self.x_is_time {
            true => shown_time(*value, last - first),
            false => shown_number(*value),
        };
        chart
            .configure_mesh()
            .x_desc(&self.x_label)
            .y_desc(&self.y_label)
            .x_label_formatter(&at)
            .y_label_formatter(&|value| shown_number(*value))
            .x_labels(if self.x_is_time { 6 } else { 10 })
            .label_style((FONT, TEXT_SIZE))
            .axis_desc_style((FONT, TEXT_SIZE))
            .light_line_style(RGBColor(240, 240, 240))
            .bold_line_style(RGBColor(215, 215, 215))
            .draw()?;
        for (series, color) in self.series.iter().zip(COLORS.iter().cycle().copied()) {
            let line = series.points.iter().map(|point| (point.x, point.y));
            chart
                .draw_series(LineSeries::new(line.clone(), color.stroke_width(2)))?
                .label(&series.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2)));
            chart.draw_series(line.map(|at| Circle::new(at, MARKER_SIZE, color.filled())))?;
            let bars: Vec<(f64, f64, f64)> = series
                .points
                .iter()
                .filter_map(|point| {
                    let error = point.error.filter(|error| error.is_finite() && *error > 0.0)?;
                    Some((point.x, (point.y - error).max(y_range.start), point.y + error))
                })
                .collect();
            let lines = bars.iter().map(|(x, low, high)| PathElement::new([(*x, *low), (*x, *high)], color));
            chart.draw_series(lines)?;
            let ends = bars.iter().flat_map(|(x, low, high)| [(*x, *low), (*x, *high)]);
            chart.draw_series(ends.map(|end| {
                EmptyElement::at(end) + PathElement::new([(-BAR_SIZE, 0), (BAR_SIZE, 0)], color)
            }))?;
        }
        if self.series.len() > 1 || self.series.iter().any(|series| !series.name.is_empty()) {
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::UpperRight)
                .label_font((FONT, TEXT_SIZE))
                .background_style(WHITE.mix(0.85))
                .border_style(RGBColor(190, 190, 190))
                .draw()?;
        }
        Ok(())
    }
}

/// A file that goes when it was read.
struct Drawn(std::path::PathBuf);

impl Drawn {
    /// The library only draws into files, and knows the format by the extension.
    fn beside(path: &Path) -> Self {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let name: String = name.chars().take(40).collect();
        Self(path.with_file_name(format!(".{name}.{}.png", std::process::id())))
    }
}

impl Drop for Drawn {
    fn drop(&mut self) {
        // Only missing when drawing failed, which is told.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The extent of values and a margin; of equal ones, something around them.
fn range(values: impl Iterator<Item = f64>, log: bool) -> Range<f64> {
    let (low, high) = values
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
    if log {
        let factor = (high / low).powf(MARGIN).max(1.1);
        return low / factor..high * factor;
    }
    let margin = match (high - low) * MARGIN {
        0.0 => (high.abs() * MARGIN).max(1e-9),
        margin => margin,
    };
    low - margin..high + margin
}

/// As few digits as tell values apart.
fn shown_number(value: f64) -> String {
    let size = value.abs();
    if size != 0.0 && !(1e-3..1e6).contains(&size) {
        return format!("{value:.1e}");
    }
    let digits = if size >= 100.0 {
        0
    } else if size >= 1.0 {
        2
    } else {
        4
    };
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// A moment in UTC, as exactly as an axis of so many milliseconds needs it.
fn shown_time(milliseconds: f64, extent: f64) -> String {
    const HOUR: f64 = 3_600_000.0;
    let text = mlx_bun::record::shown_time(milliseconds as i64).trim_end_matches('Z').replace('T', " ");
    let part = match extent {
        extent if extent < HOUR => text.get(11..),
        extent if extent < 240.0 * HOUR => text.get(..16),
        _ => text.get(..10),
    };
    part.unwrap_or(&text).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot() -> LinePlot {
        let points = |scale: f64| -> Vec<Point> {
            (1..=5).map(|x| Point { x: f64::from(x), y: f64::from(x) * scale, error: Some(0.5) }).collect()
        };
        LinePlot {
            title: "Speed & <memory>".to_owned(),
            x_label: "tokens".to_owned(),
            y_label: "tok/s".to_owned(),
            series: vec![
                Series { name: "one".to_owned(), points: points(1.0) },
                Series { name: "two".to_owned(), points: points(100.0) },
            ],
            ..LinePlot::default()
        }
    }

    #[test]
    fn a_plot_is_written_in_both_formats_on_every_axis() {
        let folder = tempfile::tempdir().unwrap();
        for (log_x, log_y) in [(false, false), (true, false), (false, true), (true, true)] {
            let plot = LinePlot { log_x, log_y, ..plot() };
            let (svg, png) = (folder.path().join("a.svg"), folder.path().join("a.png"));
            plot.write(&svg).unwrap();
            plot.write(&png).unwrap();
            let text = std::fs::read_to_string(&svg).unwrap();
            assert!(
                text.starts_with("<svg") && text.contains("sans-serif") && text.contains("two"),
                "{text}"
            );
            assert!(text.contains("&lt;memory&gt;"));
            let bytes = std::fs::read(&png).unwrap();
            assert!(bytes.starts_with(b"\x89PNG") && bytes.len() > 5000, "{}", bytes.len());
        }
        // Nothing else is left.
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn what_cannot_be_shown_is_left_out_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.svg");
        let mut odd = plot();
        odd.log_y = true;
        odd.series[0].points[0].y = -1.0;
        odd.series[0].points[1].y = f64::NAN;
        odd.series[1].points[0].error = Some(f64::INFINITY);
        odd.write(&path).unwrap();
        odd.series.truncate(1);
        odd.series[0].points.truncate(2);
        assert!(odd.write(&path).unwrap_err().to_string().contains("nothing to plot"));
        assert!(plot().write(&folder.path().join("a.jpg")).unwrap_err().to_string().contains(".svg"));
        let mut single = plot();
        single.series.truncate(1);
        single.series[0].points.truncate(1);
        single.write(&path).unwrap();
    }

    #[test]
    fn numbers_have_few_digits() {
        for (value, text) in
            [(0.0, "0"), (1234.0, "1234"), (0.5, "0.5"), (2.25, "2.25"), (1e7, "1.0e7"), (1e-5, "1.0e-5")]
        {
            assert_eq!(shown_number(value), text);
        }
        let shown = [1e3, 1e8, 1e10].map(|extent| shown_time(1_767_225_600_000.0, extent));
        assert_eq!(shown, ["00:00:00", "2026-01-01 00:00", "2026-01-01"]);
    }
}
