// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* Traffic between two processes, which may be in different VMs. */
#include "verbs-test.h"

#include <arpa/inet.h>
#include <fcntl.h>

struct peer {
	union ibv_gid gid;
	uint32_t qpn, rkey, srqn;
	uint64_t addr;
};

/* One side of a connection. */
struct end {
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct region mr;
	struct peer peer;
};

static struct end make_end(struct link *link, const struct pair_with *with, const struct conn *how)
{
	struct end end;
	struct peer mine;
	struct conn to = *how;

	end.pd = MAKE(ibv_alloc_pd(ctx));
	end.cq = MAKE(ibv_create_cq(ctx, 512, NULL, with->channel, 0));
	end.qp = make_qp(end.pd, end.cq, with);
	end.mr = region(end.pd, with->size ? with->size : 1 << 20, ALL);
	mine = (struct peer){ gid, end.qp->qp_num, end.mr.mr->rkey, 0, (uintptr_t)end.mr.p };
	put(link, &mine, sizeof(mine));
	get(link, &end.peer, sizeof(end.peer));
	to.qpn = end.peer.qpn;
	to.dgid = end.peer.gid;
	connect_qp(end.qp, &to);
	meet(link);
	return end;
}

#define END(link, ...)                                                                                              \
	({                                                                                                          \
		struct conn usual_ = conn(0);                                                                       \
		make_end(link, &(struct pair_with){ __VA_ARGS__ }, &usual_);                                        \
	})

/* Messages of many sizes back and forth, verified on arrival. */
static void echo(struct link *link, int number, enum ibv_qp_type type)
{
	struct end end = END(link, .type = type);
	static const uint32_t sizes[] = { 0, 1, 63, 64, 65, 4096, 4097, 65536, 65537, 500000 };
	uint32_t half = 512 * 1024;

	for (unsigned int i = 0; i < 3 * sizeof(sizes) / sizeof(sizes[0]); i++) {
		uint32_t size = sizes[i % 10];

		RECV(end.qp, 10, &end.mr, half, half);
		meet(link);
		for (int turn = 0; turn < 2; turn++) {
			if (turn == number) {
				fill(end.mr.p, size, i + turn);
				POST(end.qp, .opcode = i & 1 ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND, .id = 1, .from = &end.mr, .length = size,
				     .imm = htonl(i));
				expect_ok(end.cq, 1, SEND);
			} else {
				struct ibv_wc wc = expect_ok(end.cq, 10, RECV);

				EQ(wc.byte_len, size);
				EQ(wc.wc_flags & IBV_WC_WITH_IMM, i & 1 ? IBV_WC_WITH_IMM : 0);
				if (i & 1)
					EQ(ntohl(wc.imm_data), i);
				CHECK(filled(end.mr.p + half, size, i + turn));
			}
			meet(link);
		}
	}
	no_event();
}

SIDES(two_rc_send)
{
	echo(link, number, IBV_QPT_RC);
}

SIDES(two_uc_send)
{
	echo(link, number, IBV_QPT_UC);
}

/* Reads, writes and atomic operations on the other's memory. */
SIDES(two_rc_rdma)
{
	struct end end = END(link, .type = IBV_QPT_RC);
	uint32_t quarter = 256 * 1024;
	uint64_t *words = (uint64_t *)(end.mr.p + 3 * quarter);

	fill(end.mr.p, quarter, number);
	meet(link);
	POST(end.qp, .opcode = IBV_WR_RDMA_READ, .id = 1, .from = &end.mr, .offset = quarter, .length = quarter,
	     .addr = end.peer.addr, .rkey = end.peer.rkey);
	expect_ok(end.cq, 1, RDMA_READ);
	CHECK(filled(end.mr.p + quarter, quarter, !number));
	POST(end.qp, .opcode = IBV_WR_RDMA_WRITE, .id = 2, .from = &end.mr, .length = quarter, .addr = end.peer.addr + 2 * quarter,
	     .rkey = end.peer.rkey);
	expect_ok(end.cq, 2, RDMA_WRITE);
	meet(link);
	CHECK(filled(end.mr.p + 2 * quarter, quarter, !number));
	/* Both count in the memory of number 0: it by its processor, the other from afar. */
	for (uint64_t i = 0; i < 500; i++) {
		if (number == 0) {
			__atomic_fetch_add(&words[0], 1, __ATOMIC_SEQ_CST);
			continue;
		}
		POST(end.qp, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .id = i, .from = &end.mr, .length = 8,
		     .addr = end.peer.addr + 3 * quarter, .rkey = end.peer.rkey, .compare_add = 1);
		expect_ok(end.cq, i, FETCH_ADD);
	}
	meet(link);
	if (number == 0)
		EQ(words[0], 1000);
	/* What was not granted. */
	if (number == 1) {
		POST(end.qp, .opcode = IBV_WR_RDMA_WRITE, .id = 9, .from = &end.mr, .length = 8, .addr = end.peer.addr,
		     .rkey = end.peer.rkey ^ 0x55);
		expect_error(end.cq, 9, REM_ACCESS_ERR);
	} else {
		wait_event(QP_ACCESS_ERR);
		wait_state(end.qp, IBV_QPS_ERR);
	}
	meet(link);
}

SIDES(two_uc_write)
{
	struct end end = END(link, .type = IBV_QPT_UC);
	uint32_t half = 512 * 1024;

	for (int i = 0; i < 10; i++) {
		RECV(end.qp, 10, NULL, 0, 0);
		fill(end.mr.p, half, 10 * i + number);
		meet(link);
		POST(end.qp, .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .id = 1, .from = &end.mr, .length = half,
		     .addr = end.peer.addr + half, .rkey = end.peer.rkey, .imm = htonl(i));
		struct ibv_wc one = wait_wc(end.cq), two = wait_wc(end.cq);
		EQ(one.status | two.status, IBV_WC_SUCCESS);
		EQ(one.wr_id + two.wr_id, 11);
		EQ(ntohl((one.wr_id == 10 ? one : two).imm_data), i);
		CHECK(filled(end.mr.p + half, half, 10 * i + !number));
		meet(link);
	}
}

/* Both sides keep many messages of both kinds under way. */
SIDES(two_rc_bidirectional)
{
	struct end end = END(link, .type = IBV_QPT_RC, .send_wr = 64, .recv_wr = 64);
	unsigned int posted = 0, sent = 0, received = 0, armed = 0;
	const unsigned int count = 2000;

	(void)number;
	for (; armed < 32; armed++)
		RECV(end.qp, armed, &end.mr, 524288 + 1024 * (armed % 64), 1024);
	meet(link);
	while (sent < count || received < count) {
		struct ibv_wc wc;

		while (posted < count && posted - sent < 32) {
			/* Several messages are under way: each from a place of its own. */
			uint64_t *at = (uint64_t *)(end.mr.p + 1024 * (posted % 64));

			at[0] = posted;
			at[63] = ~(uint64_t)posted;
			POST(end.qp, .opcode = IBV_WR_SEND, .id = posted, .from = &end.mr, .offset = 1024 * (posted % 64), .length = 512);
			posted++;
		}
		wc = wait_wc(end.cq);
		EQ(wc.status, IBV_WC_SUCCESS);
		if (wc.opcode == IBV_WC_SEND) {
			EQ(wc.wr_id, sent++);
			continue;
		}
		uint64_t *at = (uint64_t *)(end.mr.p + 524288 + 1024 * (received % 64));
		EQ(wc.wr_id, received);
		EQ(wc.byte_len, 512);
		EQ(at[0], received);
		EQ(at[63], ~(uint64_t)received);
		received++;
		if (armed < count) {
			RECV(end.qp, armed, &end.mr, 524288 + 1024 * (armed % 64), 1024);
			armed++;
		}
	}
	meet(link);
}

/* Completion events on both sides, and sleeping in between. */
SIDES(two_rc_events)
{
	struct ibv_comp_channel *channel = MAKE(ibv_create_comp_channel(ctx));
	struct end end = END(link, .type = IBV_QPT_RC, .channel = channel);
	const uint64_t rounds = 100;

	uint64_t received = 0;
	struct ibv_wc wc;

	OK(ibv_req_notify_cq(end.cq, 0));
	RECV(end.qp, 1000, &end.mr, 4096, 64);
	meet(link);
	if (number == 0)
		POST(end.qp, .opcode = IBV_WR_SEND, .id = 0, .from = &end.mr, .length = 8);
	while (received < rounds) {
		CHECK(channel_event(channel, end.cq, TIMEOUT_MS));
		OK(ibv_req_notify_cq(end.cq, 0));
		while (ibv_poll_cq(end.cq, 1, &wc) == 1) {
			EQ(wc.status, IBV_WC_SUCCESS);
			if (wc.opcode == IBV_WC_SEND)
				continue;
			EQ(wc.wr_id, 1000 + received);
			received++;
			RECV(end.qp, 1000 + received, &end.mr, 4096, 64);
			if (number == 1 || received < rounds)
				POST(end.qp, .opcode = IBV_WR_SEND, .id = received, .from = &end.mr, .length = 8);
		}
	}
	meet(link);
}

/* XRC: each side has an initiator to the other's target, and one SRQ. */
SIDES(two_xrc)
{
	struct ibv_xrcd_init_attr domain = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1,
					     .oflags = O_CREAT };
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	struct ibv_cq *send_cq = make_cq(64), *recv_cq = make_cq(64);
	struct region mr = region(pd, 65536, ALL);
	struct peer mine[2], theirs[2];
	struct conn to = conn(0);

	if (!(dev.orig_attr.device_cap_flags & IBV_DEVICE_XRC))
		skip("the device has no XRC");
	struct ibv_xrcd *xrcd = MAKE(ibv_open_xrcd(ctx, &domain));
	struct ibv_srq_init_attr_ex srq_attr = {
		.attr = { .max_wr = 32, .max_sge = 1 },
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
		.srq_type = IBV_SRQT_XRC,
		.pd = pd,
		.xrcd = xrcd,
		.cq = recv_cq,
	};
	struct ibv_srq *srq = MAKE(ibv_create_srq_ex(ctx, &srq_attr));
	struct ibv_qp_init_attr_ex ini_attr = { .qp_type = IBV_QPT_XRC_SEND, .send_cq = send_cq, .comp_mask = IBV_QP_INIT_ATTR_PD,
						.pd = pd, .cap = { .max_send_wr = 32, .max_send_sge = 1 } };
	struct ibv_qp_init_attr_ex tgt_attr = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd };
	struct ibv_qp *ini = MAKE(ibv_create_qp_ex(ctx, &ini_attr)), *tgt = MAKE(ibv_create_qp_ex(ctx, &tgt_attr));
	uint32_t srqn;

	OK(ibv_get_srq_num(srq, &srqn));
	mine[0] = (struct peer){ gid, ini->qp_num, mr.mr->rkey, srqn, (uintptr_t)mr.p };
	mine[1] = (struct peer){ gid, tgt->qp_num, mr.mr->rkey, srqn, (uintptr_t)mr.p };
	put(link, mine, sizeof(mine));
	get(link, theirs, sizeof(theirs));
	to.dgid = theirs[0].gid;
	to.qpn = theirs[1].qpn;
	connect_qp(ini, &to);
	to.qpn = theirs[0].qpn;
	connect_qp(tgt, &to);
	for (int i = 0; i < 20; i++)
		OK(post_srq(srq, i, &mr, 32768 + 1024 * i, 1024));
	meet(link);
	for (int i = 0; i < 20; i++) {
		fill(mr.p, 900, 100 * number + i);
		POST(ini, .opcode = IBV_WR_SEND, .id = i, .from = &mr, .length = 900, .srqn = theirs[0].srqn);
		expect_ok(send_cq, i, SEND);
		struct ibv_wc wc = expect_ok(recv_cq, i, RECV);
		EQ(wc.qp_num, tgt->qp_num);
		EQ(wc.byte_len, 900);
		CHECK(filled(mr.p + 32768 + 1024 * i, 900, 100 * !number + i));
	}
	POST(ini, .opcode = IBV_WR_RDMA_WRITE, .id = 50, .from = &mr, .length = 900, .addr = theirs[0].addr + 16384,
	     .rkey = theirs[0].rkey, .srqn = theirs[0].srqn);
	expect_ok(send_cq, 50, RDMA_WRITE);
	meet(link);
	CHECK(filled(mr.p + 16384, 900, 100 * !number + 19));
	meet(link);
}

/* The one who polls on the last byte of a write finds all before it. */
SIDES(two_rc_poll_on_memory)
{
	struct end end = END(link, .type = IBV_QPT_RC);
	const uint32_t size = 300000;
	volatile uint8_t *last = end.mr.p + size - 1;

	for (int i = 1; i <= 40; i++) {
		if ((i & 1) == number) {
			memset(end.mr.p + 524288, i, size);
			POST(end.qp, .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &end.mr, .offset = 524288, .length = size,
			     .addr = end.peer.addr, .rkey = end.peer.rkey);
			expect_ok(end.cq, i, RDMA_WRITE);
		} else {
			uint64_t deadline = now_ns() + TIMEOUT_MS * 1000000ull;

			while (*last != i)
				CHECK(now_ns() < deadline);
			__atomic_thread_fence(__ATOMIC_ACQUIRE);
			CHECK(all_bytes(end.mr.p, size, i));
		}
	}
	meet(link);
}

/* The other's queue pair goes away under traffic. */
SIDES(two_rc_peer_goes_away)
{
	struct conn how = conn(0);
	struct pair_with with = { .type = IBV_QPT_RC, .send_wr = 64 };

	how.timeout = 14;
	how.retry_cnt = 2;
	struct end end = make_end(link, &with, &how);
	if (number == 1) {
		sleep_ms(50);
		OK(ibv_destroy_qp(end.qp));
		meet(link);
		return;
	}
	bool good = true;
	for (uint64_t posted = 0, polled = 0; good || polled < posted;) {
		struct ibv_wc wc;

		while (good && posted - polled < 16) {
			POST(end.qp, .opcode = IBV_WR_RDMA_WRITE, .id = posted, .from = &end.mr, .length = 65536, .addr = end.peer.addr,
			     .rkey = end.peer.rkey);
			posted++;
		}
		wc = wait_wc(end.cq);
		EQ(wc.wr_id, polled++);
		if (wc.status == IBV_WC_SUCCESS) {
			CHECK(good);
		} else if (good) {
			EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
			good = false;
		} else {
			EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
		}
	}
	meet(link);
}
