/* SPDX-License-Identifier: MIT */
/* The plot of 09_bandwidth: GB/s over the bytes in flight per SM, in four panels with a line for each method. It is
   an SVG, written without a library, whose colours follow the reader's light or dark theme. Plain C.

       bandwidth_plot p = {...};
       if (!bandwidth_plot_write(&p, "plot.svg"))   // errno says why
           ...
*/
#ifndef BANDWIDTH_PLOT_H
#define BANDWIDTH_PLOT_H

#include <stdbool.h>
#include <stdio.h>

enum { plot_panels = 4, plot_lines = 3, plot_points_max = 16 };

typedef struct bandwidth_plot {
    const char *title;
    char panels[plot_panels][80];                         /* titles, two panels in each of two rows */
    const char *lines[plot_lines];                        /* names; NULL: the line is left out */
    int points;                                           /* point p is 1 << p KB in flight */
    double gbs[plot_panels][plot_lines][plot_points_max]; /* 0: not measured */
    double copied, peak;                                  /* dashed lines: cudaMemcpyAsync; the datasheet, 0: unknown */
} bandwidth_plot;

enum { plot_width = 400, plot_height = 220, plot_left = 70, plot_top = 148, plot_between_x = 30, plot_between_y = 90 };
static const char *const plot_colours[plot_lines] = {"#2878c8", "#d97706", "#2a9d5c"};
static const char *const plot_peak_dashes = "8 4", *const plot_copied_dashes = "2 3";

static void plot_write_head(FILE *f, const char *title)
{
    const int width = plot_left + 2 * plot_width + plot_between_x + 20;
    const int height = plot_top + 2 * plot_height + plot_between_y + 60;
    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" "
            "font-family=\"sans-serif\" font-size=\"13\">\n<style>\n"
            "  .back { fill: #ffffff } text { fill: #222222 } .grid { stroke: #dddddd } .axis { stroke: #555555 }\n"
            "  .limit { stroke: #555555; fill: none }\n"
            "  @media (prefers-color-scheme: dark) {\n"
            "    .back { fill: #16181d } text { fill: #e4e4e4 } .grid { stroke: #3a3d44 } .axis { stroke: #b0b0b0 }\n"
            "    .limit { stroke: #b0b0b0 }\n  }\n</style>\n"
            "<rect class=\"back\" width=\"%d\" height=\"%d\"/>\n",
            width, height, width, height, width, height);
    fprintf(f, "<text x=\"%d\" y=\"32\" font-size=\"18\" font-weight=\"bold\">Memory bandwidth of %s</text>\n",
            plot_left, title);
    fprintf(f, "<text x=\"%d\" y=\"52\">the best number and size of blocks for each number of bytes in flight</text>\n",
            plot_left);
}

/* Lines have circles, squares or triangles, so that one can tell them apart without colours. */
static void plot_write_mark(FILE *f, int line, double x, double y)
{
    if (line == 0)
        fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\"", x, y);
    else if (line == 1)
        fprintf(f, "<rect x=\"%.1f\" y=\"%.1f\" width=\"8\" height=\"8\"", x - 4, y - 4);
    else
        fprintf(f, "<path d=\"M%.1f %.1f l5 9 h-10 z\"", x, y - 6);
    fprintf(f, " fill=\"%s\"/>\n", plot_colours[line]);
}

static void plot_write_limit(FILE *f, int x, const char *dashes, const char *name, double gbs)
{
    fprintf(f, "<path class=\"limit\" d=\"M%d 96 h30\" stroke-dasharray=\"%s\"/>\n", x, dashes);
    fprintf(f, "<text x=\"%d\" y=\"101\">%s, %.0f GB/s</text>\n", x + 38, name, gbs);
}

static void plot_write_legend(FILE *f, const bandwidth_plot *p)
{
    int x = plot_left;
    for (int l = 0; l < plot_lines; l++) {
        if (!p->lines[l])
            continue;
        fprintf(f, "<path d=\"M%d 74 h30\" stroke=\"%s\" stroke-width=\"2\"/>\n", x, plot_colours[l]);
        plot_write_mark(f, l, x + 15, 74);
        fprintf(f, "<text x=\"%d\" y=\"79\">%s</text>\n", x + 38, p->lines[l]);
        x += 170;
    }
    plot_write_limit(f, plot_left, plot_copied_dashes, "cudaMemcpyAsync", p->copied);
    if (p->peak > 0)
        plot_write_limit(f, plot_left + 340, plot_peak_dashes, "datasheet", p->peak);
}

/* Positions count from the left and top edge of a panel. */
static double plot_x(const bandwidth_plot *p, int point)
{
    return plot_width * (0.5 + point) / p->points;
}

static double plot_y(double gbs, double gbs_max)
{
    return plot_height * (1 - gbs / gbs_max);
}

static void plot_write_axes(FILE *f, const bandwidth_plot *p, bool numbers, double step, double gbs_max)
{
    for (double gbs = 0; gbs <= gbs_max; gbs += step) {
        const double y = plot_y(gbs, gbs_max);
        fprintf(f, "<path class=\"%s\" d=\"M0 %.1f h%d\"/>\n", gbs > 0 ? "grid" : "axis", y, plot_width);
        if (numbers)
            fprintf(f, "<text x=\"-8\" y=\"%.1f\" text-anchor=\"end\">%.0f</text>\n", y + 4, gbs);
    }
    for (int i = 0; i < p->points; i++)
        fprintf(f, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%d</text>\n", plot_x(p, i), plot_height + 18,
                1 << i);
    fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">KB in flight per SM</text>\n", plot_width / 2,
            plot_height + 38);
    fprintf(f, "<path class=\"limit\" d=\"M0 %.1f h%d\" stroke-dasharray=\"%s\"/>\n", plot_y(p->copied, gbs_max),
            plot_width, plot_copied_dashes);
    if (p->peak > 0)
        fprintf(f, "<path class=\"limit\" d=\"M0 %.1f h%d\" stroke-dasharray=\"%s\"/>\n", plot_y(p->peak, gbs_max),
                plot_width, plot_peak_dashes);
}

static void plot_write_line(FILE *f, const bandwidth_plot *p, int panel, int line, double gbs_max)
{
    const double *const gbs = p->gbs[panel][line];
    int any = 0;
    for (int i = 0; i < p->points; i++)
        if (gbs[i] > 0)
            fprintf(f, "%s%.1f %.1f", any++ ? " L" : "<path fill=\"none\" d=\"M", plot_x(p, i),
                    plot_y(gbs[i], gbs_max));
    if (any)
        fprintf(f, "\" stroke=\"%s\" stroke-width=\"2\"/>\n", plot_colours[line]);
    for (int i = 0; i < p->points; i++)
        if (gbs[i] > 0)
            plot_write_mark(f, line, plot_x(p, i), plot_y(gbs[i], gbs_max));
}

static double plot_highest(const bandwidth_plot *p)
{
    double highest = p->peak > p->copied ? p->peak : p->copied;
    for (int k = 0; k < plot_panels * plot_lines * p->points; k++) {
        const double gbs = p->gbs[k / p->points / plot_lines][k / p->points % plot_lines][k % p->points];
        highest = gbs > highest ? gbs : highest;
    }
    return highest;
}

static bool bandwidth_plot_write(const bandwidth_plot *p, const char *path)
{
    const double highest = plot_highest(p);
    double step = 1;
    FILE *const f = fopen(path, "w");
    if (!f)
        return false;
    for (int i = 0; highest / step > 8; i++) /* 1, 2, 5, 10, 20, 50, ... */
        step *= i % 3 == 1 ? 2.5 : 2;
    const double gbs_max = step * (double)(int)(highest / step + 1);
    plot_write_head(f, p->title);
    plot_write_legend(f, p);
    for (int k = 0; k < plot_panels; k++) {
        fprintf(f, "<g transform=\"translate(%d %d)\">\n<text y=\"-12\" font-weight=\"bold\">%s</text>\n",
                plot_left + k % 2 * (plot_width + plot_between_x), plot_top + k / 2 * (plot_height + plot_between_y),
                p->panels[k]);
        plot_write_axes(f, p, k % 2 == 0, step, gbs_max);
        for (int l = 0; l < plot_lines; l++)
            plot_write_line(f, p, k, l, gbs_max);
        fprintf(f, "</g>\n");
    }
    fprintf(f, "</svg>\n");
    const bool written = !ferror(f);
    return fclose(f) == 0 && written;
}
#endif
